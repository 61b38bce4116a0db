"""A training job from its configuration to exported models.

    output_dir/
      job.json              the resolved job, and what ran it
      initial/              the model before training
      cache/                tokenised sources
      stages/<stage>/       checkpoints, metrics.jsonl, tensorboard/
      models/<stage>/       the trained model, with training.json; there only when complete

Running the same job again skips what is done and resumes what is not.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from mars_ray.config.train import TrainJob
from mars_ray.errors import TrainingError
from mars_ray.provenance import provenance
from mars_ray.train.checkpoint import MODEL
from mars_ray.train.initial import initial_model
from mars_ray.train.keeping import best_checkpoint
from mars_ray.train.loop import StageOutcome
from mars_ray.train.on_ray import fit_stage
from mars_ray.train.plan import StagePlan, identity, stage_plan, with_absolute_paths
from mars_ray.writer import sole_writer

_SUMMARY = "training.json"


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a job left behind, by stage."""

    models: dict[str, Path]
    steps: dict[str, int]
    metrics: dict[str, dict[str, float]]  # of the last log and the last evaluation
    seconds: dict[str, float]  # of training, over all attempts


def run_training(job: TrainJob) -> TrainResult:
    """Run all stages on the cluster that `ray.init` has connected to.

    Raises DataError, ModelError, ConfigError if output_dir cannot be written or another process is
    writing it, or TrainingError: when it holds another job, when a stage fails for good, and when
    it was stopped with Ctrl-C (run again to resume).
    """
    job = with_absolute_paths(job)
    output_dir = Path(job.output_dir)
    with sole_writer(output_dir, output_dir / ".lock", "output_dir"):
        _claim(output_dir, job)
        return _run_stages(job, output_dir)


def _run_stages(job: TrainJob, output_dir: Path) -> TrainResult:
    model = initial_model(job)
    result = TrainResult({}, {}, {}, {})
    for stage in job.stages:
        exported = output_dir / "models" / stage
        if not (exported / _SUMMARY).exists():
            plan = stage_plan(job, stage, model)
            _export(plan, fit_stage(plan), exported)
        summary = json.loads((exported / _SUMMARY).read_text())
        result.models[stage] = model = exported
        result.steps[stage] = summary["steps"]
        result.metrics[stage] = summary["metrics"]
        result.seconds[stage] = summary["seconds"]
    return result


def _claim(output_dir: Path, job: TrainJob) -> None:
    """Make the directory this job's. Raises TrainingError if it is another's."""
    path = output_dir / "job.json"
    if path.exists():
        before, now = (
            identity(known) | {"order of stages": list(known.stages)}
            for known in (_recorded(path), job)
        )
        changed = sorted(key for key in before | now if before.get(key) != now.get(key))
        if changed:
            raise TrainingError(
                f"{output_dir} holds a run of another job, with another {', '.join(changed)}. "
                "Choose another output_dir, or delete this one to start afresh"
            )
    content = {"job": job.model_dump(mode="json"), "provenance": provenance()}
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content, indent=1))
    os.replace(draft, path)


def _recorded(path: Path) -> TrainJob:
    try:
        return TrainJob.model_validate(json.loads(path.read_text())["job"])
    except (ValueError, KeyError) as error:
        raise TrainingError(
            f"{path} is not a job of this version of mars-ray, so its run cannot be resumed: "
            f"{error}. Choose another output_dir, or delete this one"
        ) from error


def _export(plan: StagePlan, outcome: StageOutcome, directory: Path) -> None:
    """A checkpoint's model under its final name; appears whole, with its summary."""
    draft = directory.with_name(f".{directory.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    config = plan.job.checkpoint
    wants_best = config.best is not None and config.best.export
    source = best_checkpoint(plan.run_dir, config) if wants_best else outcome.checkpoint
    shutil.copytree(source / MODEL, draft)
    summary = {
        "job": plan.job.name,
        "stage": plan.stage,
        "steps": outcome.step,
        "checkpoint": source.name,
        "seconds": outcome.seconds,
        "metrics": outcome.metrics,
        "provenance": provenance(),
    }
    (draft / _SUMMARY).write_text(json.dumps(summary, indent=1))
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(draft, directory)
