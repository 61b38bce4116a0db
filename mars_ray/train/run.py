"""A training job from its configuration to exported models.

    output_dir/
      job.json              the resolved job, the same as it was given, and what ran it
      initial/              the model before training; not of a draft adapter, whose is untouched
      cache/                tokenised sources
      stages/<stage>/       checkpoints, metrics.jsonl, tensorboard/
      models/<stage>/       the trained model or draft adapter, with training.json; there only when
                            complete

Running the same job again skips finished stages and resumes unfinished ones.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars_ray.cluster.connection import Connect, already
from mars_ray.config.inputs import PresetModel
from mars_ray.config.train import TrainJob
from mars_ray.errors import TrainingError
from mars_ray.files import changed_in_all, changed_keys, remedy, sole_writer, write_whole
from mars_ray.provenance import provenance
from mars_ray.train.checkpoint import MANIFEST, MODEL, best_checkpoint, read_state
from mars_ray.train.loop import StageOutcome
from mars_ray.train.on_ray import fit_stage
from mars_ray.train.plan import StagePlan, identity, initial_model, stage_plan, with_absolute_paths

_RECORD = "job.json"
_SUMMARY = "training.json"


@dataclass(frozen=True, slots=True)
class TrainResult:
    models: dict[str, Path]
    steps: dict[str, int]
    metrics: dict[str, dict[str, float]]  # the model's last log and evaluation
    seconds: dict[str, float]  # training time over all attempts


def run_training(job: TrainJob, connect: Connect = already) -> TrainResult:
    """Run all stages on the cluster to which `connect` connects, before the first stage that has
    something left to do: its model and data are ready by then.

    Raises DataError, ModelError, and ConfigError if output_dir cannot be written or another process
    is writing it. Raises TrainingError when output_dir holds another job, when a stage fails for
    good, and when it was stopped with Ctrl-C (run again to resume).
    """
    given, job = job, with_absolute_paths(job)
    output_dir = Path(job.output_dir)
    with sole_writer(output_dir, output_dir / ".lock", "output_dir"):
        _claim(output_dir, job, given)
        model, adapter = initial_model(job), None
        result = TrainResult({}, {}, {}, {})
        stopped = False
        for stage in job.stages:
            exported = output_dir / "models" / stage
            if not (exported / _SUMMARY).exists():
                if stopped:
                    raise TrainingError(
                        f"stopped before stage {stage!r}; run the same command again to resume"
                    )
                plan = stage_plan(job, stage, model, adapter)
                connect()
                _export(plan, fit_stage(plan), exported)
                # A stop may have been requested when the stage had no step left to stop at.
                stopped = plan.stop_file.exists()
            summary = json.loads((exported / _SUMMARY).read_text())
            if job.stages[stage].adapter is None:
                model = exported
            else:
                adapter = exported
            result.models[stage] = exported
            result.steps[stage] = summary["steps"]
            result.metrics[stage] = summary["metrics"]
            result.seconds[stage] = summary["seconds"]
        return result


def begun(output_dir: Path) -> TrainJob | None:
    """The job that has claimed the directory; None if none has, or its record cannot be read."""
    try:
        return TrainJob.model_validate(json.loads((output_dir / _RECORD).read_text())["job"])
    except (OSError, ValueError, KeyError):
        return None


def _claim(output_dir: Path, job: TrainJob, given: TrainJob) -> None:
    """Claim the directory for this job, whose paths are absolute, and which was given with others.
    Raises TrainingError if another job has trained here."""
    path, moved, changed = output_dir / _RECORD, list[str](), list[str]()
    if path.exists():
        try:
            record = json.loads(path.read_text())
            known = [(TrainJob.model_validate(record["job"]), job)]
            if "given" in record:
                known.append((TrainJob.model_validate(record["given"]), given))
        except json.JSONDecodeError as error:
            raise TrainingError(
                f"{path}, which says what the run is of, is damaged: {error}. Choose another "
                "output_dir, or delete this one"
            ) from error
        except (ValueError, KeyError) as error:
            raise TrainingError(
                f"{path} is not a job of this version of mars-ray, so its run cannot be resumed: "
                f"{error}. Choose another output_dir, or delete this one"
            ) from error
        forms = [(_deciding(before), _deciding(now)) for before, now in known]
        moved, changed = changed_keys(*forms[0]), changed_in_all(forms)
    trained = f"stages/*/*/{MANIFEST}", f"models/*/{_SUMMARY}"
    if any(any(output_dir.glob(place)) for place in trained):
        if changed:
            raise TrainingError(
                f"{output_dir} holds a run of another job, with another {', '.join(changed)}. "
                "Choose another output_dir, or delete this one to start afresh"
            )
    elif moved or isinstance(job.model, PresetModel):
        # A preset's tokenizer is made from the data, which may have been repaired since.
        shutil.rmtree(output_dir / "initial", ignore_errors=True)
    jobs = {"job": job.model_dump(mode="json"), "given": given.model_dump(mode="json")}
    with _explained(path):
        write_whole(path, json.dumps(jobs | {"provenance": provenance()}, indent=1))


def _deciding(job: TrainJob) -> dict[str, Any]:
    return identity(job) | {"order of stages": list(job.stages)}


def _export(plan: StagePlan, outcome: StageOutcome, directory: Path) -> None:
    """Copy a checkpoint's model to its final name; it appears whole, with its summary."""
    draft = directory.with_name(f".{directory.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    config = plan.job.checkpoint
    wants_best = config.best is not None and config.best.export
    source = best_checkpoint(plan.run_dir, config) if wants_best else outcome.checkpoint
    state = read_state(source)
    summary = {
        "job": plan.job.name,
        "stage": plan.stage,
        "steps": state.step,
        "checkpoint": source.name,
        "seconds": outcome.seconds,
        "metrics": state.metrics,
        "provenance": provenance(),
    }
    with _explained(directory):
        shutil.copytree(source / MODEL, draft)
        (draft / _SUMMARY).write_text(json.dumps(summary, indent=1))
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(draft, directory)


@contextmanager
def _explained(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # copytree's own message has a line for each file.
        raise TrainingError(
            f"{place} could not be written: {str(error)[:200]}. {remedy(error)}, then run "
            "the same command again"
        ) from error
