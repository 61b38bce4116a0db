"""A sweep, from its configuration to the end of its trials; run again to resume.

output_dir/
  sweep.json        the resolved job, the same as it was given, and its provenance
  base/             the stages before the tried one, and the model that trials start from
  cache/            tokenised sources, shared by all trials
  trials.jsonl      the events of all trials (search.py)
  trials/<id>/      the Train runs of a trial
  tune/             Ray Tune's own state
  frontiers/<id>/   the survivors' generated results
  results.*, pareto.png, best.toml
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import tomli_w
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler
from rich.console import Console

from mars_ray.cluster.connection import Connect, already, gpus_each, trained
from mars_ray.config.evaluate import Gsm8kTask, PromptsTask
from mars_ray.config.tune import AshaScheduler, TuneJob
from mars_ray.errors import TrainingError
from mars_ray.evaluate.tasks import problems_of
from mars_ray.files import changed_in_all, replaced, sole_writer, write_whole
from mars_ray.progress import Lines
from mars_ray.provenance import provenance
from mars_ray.train.plan import (
    absolute_files,
    absolute_path,
    initial_model,
    stage_plan,
    with_absolute_paths,
)
from mars_ray.train.run import run_training
from mars_ray.tune.results import (
    Row,
    best,
    check_room,
    measure,
    plot_sweep,
    rows_of,
    summary_of,
    survivors,
    write_results,
)
from mars_ray.tune.search import (
    LEDGER_FILE,
    EarlyStopping,
    Ledger,
    check_space,
    domains,
    searcher_of,
    trial_job,
    trials_ended,
    values_at,
)
from mars_ray.tune.trial import MarsTrial

_NAME = "tune"
# Memory of a trial's own process, which gets no share of a CPU because it only waits.
_DRIVER_MEMORY_BYTES = 500 << 20
_SETTINGS = {
    # Our ledger and table replace Tune's loggers.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "5",
    # A trial whose loss is not finite ends without metrics.
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep that has ended."""

    rows: list[Row]
    summary: dict[str, Any]


def run_sweep(job: TuneJob, console: Console, connect: Connect = already) -> Sweep:
    """Run, measure and write a sweep on the cluster to which `connect` connects, once the inputs
    are ready; a repeated call resumes it. Raises MarsError."""
    resolved = absolute(job)
    directory = Path(resolved.output_dir)
    with sole_writer(directory, directory / ".lock", "output_dir"):
        ledger = run_trials(job, console, connect)
        kept = survivors(ledger, job.objectives)
        frontiers = measure(resolved, kept, start_model(job), console)
        chosen = best(frontiers, job.objectives, kept)
        rows = rows_of(job, ledger, frontiers, chosen)
        sweep = Sweep(rows, summary_of(job, rows, frontiers))
        write_results(directory, job, rows, sweep.summary)
        with replaced(directory / "pareto.png") as draft:
            plot_sweep(rows, frontiers, job.objectives, draft)
        # The best trial's settings, as a job for `mars-ray train`.
        table = trial_job(job, chosen.values).model_dump(mode="json", exclude_none=True)
        header = f"# The best of {job.trial_count} trials: {chosen.trial}.\n"
        write_whole(directory / "best.toml", header + tomli_w.dumps(table))
        return sweep


def run_trials(job: TuneJob, console: Console, connect: Connect = already) -> Ledger:
    """Run every trial to its end, on the cluster to which `connect` connects.

    Raises ConfigError, before any trial, if a point of the space is not a valid training job or a
    trial's model could not generate. Raises DataError if the objectives' task cannot be read, and
    TrainingError if output_dir holds another sweep or the sweep was stopped.
    """
    given, job = job, absolute(job)
    check_space(job)
    problems = problems_of(job.objectives.task)
    _claim(job, given)
    start = start_model(given, connect)
    check_room(job, problems, start)
    # Tokenises the data once, before the first trial needs it.
    stage_plan(job.train, job.stage_name, start)
    connect()
    trained(job.train.cluster)  # or every trial would refuse it
    os.environ.update({name: value for name, value in _SETTINGS.items() if name not in os.environ})
    # Otherwise Tune warns about missing result files, which it was configured not to write.
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    path = Path(job.output_dir) / LEDGER_FILE
    tuner = _tuner(job, start, _Watch(job, path, console), console)
    with Lines(console, lambda: f"{trials_ended(path)} of {job.trial_count} trials have ended"):
        grid = tuner.fit()
    ledger = Ledger(path)
    known = {Path(result.path).name for result in grid}
    for trial in ledger.trials.values():
        # Begun seconds before a driver was killed: Tune saved nothing of it, and another has
        # replaced it.
        if trial.status == "running" and trial.trial not in known:
            ledger.append("error", trial.trial, error="lost with the driver, soon after its start")
            ledger.append("end", trial.trial, status="failed")
    is_running = any(trial.status == "running" for trial in ledger.trials.values())
    if is_running or len(ledger.trials) < job.trial_count:
        raise TrainingError("the sweep was stopped; run the same command again to resume")
    return ledger


def absolute(job: TuneJob) -> TuneJob:
    """The job made independent of the working directory, with one cache for all trials."""
    output_dir = absolute_path(job.output_dir)
    train = with_absolute_paths(job.train)
    if train.data.cache_dir is None:
        cached = train.data.model_copy(update={"cache_dir": str(Path(output_dir) / "cache")})
        train = train.model_copy(update={"data": cached})
    task = job.objectives.task
    if isinstance(task, Gsm8kTask):
        task = task.model_copy(update={"path": absolute_path(task.path)})
    if isinstance(task, PromptsTask):
        kinds = {name: absolute_files(source) for name, source in task.kinds.items()}
        task = task.model_copy(update={"kinds": kinds})
    objectives = job.objectives.model_copy(update={"task": task})
    update = {"output_dir": output_dir, "train": train, "objectives": objectives}
    return job.model_copy(update=update)


def trials_at_once(job: TuneJob, cluster: Mapping[str, float]) -> int:
    """The job's number of concurrent trials, or what fits on the cluster now. The cluster may grow
    for more: a waiting trial holds only its driver's memory."""
    if job.max_concurrent:
        return min(job.max_concurrent, job.trial_count)
    asked = job.train.cluster
    room = int(cluster.get("CPU", 0) / (asked.workers * asked.cpus_per_worker) + 1e-9)
    if each := gpus_each(asked.gpus_per_worker, cluster.get("GPU", 0)):
        gpus = asked.workers * each
        room = min(room, int(cluster.get("GPU", 0) / gpus + 1e-9))
    return max(1, min(room, job.trial_count))


def _tuner(job: TuneJob, start: Path, watch: "_Watch", console: Console) -> tune.Tuner:
    trainable: Any = tune.with_resources(
        tune.with_parameters(MarsTrial, sweep=job, start_model=start),
        {"memory": _DRIVER_MEMORY_BYTES},
    )
    state = Path(job.output_dir) / _NAME
    if any(state.glob("experiment_state-*.json")):
        console.print(
            f"resuming: {len(watch.ledger.trials)} of {job.trial_count} trials have begun"
        )
        return tune.Tuner.restore(
            str(state), trainable, resume_unfinished=True, param_space=domains(job)
        )
    # Killed before its first trial, so there is nothing to resume from.
    shutil.rmtree(state, ignore_errors=True)
    at_once = trials_at_once(job, ray.cluster_resources())
    console.print(f"{job.trial_count} trials, {at_once} at once")
    return tune.Tuner(
        trainable,
        param_space=domains(job),
        tune_config=tune.TuneConfig(
            num_samples=job.trials or 1,
            search_alg=searcher_of(job, at_once),
            scheduler=EarlyStopping(job, watch.ledger.path)
            if isinstance(job.scheduler, AshaScheduler)
            else FIFOScheduler(),
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name=_NAME,
            storage_path=job.output_dir,
            failure_config=tune.FailureConfig(max_failures=job.retries),
            # Trials write their own checkpoints.
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            callbacks=[watch],
            verbose=0,
        ),
    )


class _Watch(tune.Callback):
    """Writes the ledger and prints events, in the driver."""

    def __init__(self, job: TuneJob, ledger: Path, console: Console) -> None:
        self._job = job
        self._ledger_path = ledger
        self._console: Console | None = console
        self._ledger: Ledger | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles callbacks for a restored sweep, which reads the ledger again.
        return self.__dict__ | {"_console": None, "_ledger": None}

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            self._ledger = Ledger(self._ledger_path)
        return self._ledger

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        self._begin(trial)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **_: Any
    ) -> None:
        if "score" not in result:
            return
        self._begin(trial)
        step, score, metrics = result["step"], result["score"], result["metrics"]
        self.ledger.append("score", trial.trial_id, step=step, score=score, metrics=metrics)
        speed, loss = metrics["tokens_per_forward"], metrics["clean_ce"]
        self._say(trial, f"step {step}: expected T/F {speed:.3f}, clean {loss:.4f}")

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **_: Any
    ) -> None:
        last = trial.last_result
        if "fatal" in last:
            self.ledger.append("error", trial.trial_id, error=last["fatal"])
            self._end(trial, "failed")
        elif "model" in last:
            model = Path(last["model"]).relative_to(self._job.output_dir)
            self._end(trial, "finished", model=str(model))
        else:
            self._end(trial, "stopped")

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        self._fail(trial)
        self._say(trial, "is tried again")

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        self._fail(trial)
        self._end(trial, "failed")

    def _begin(self, trial: Trial) -> None:
        known = self.ledger.trials.get(trial.trial_id)
        if known is None or known.status != "running":
            self.ledger.append("start", trial.trial_id, values=values_at(self._job, trial.config))

    def _fail(self, trial: Trial) -> None:
        self._begin(trial)
        # The last line of the error that ended an attempt names it.
        path = trial.error_file
        text = Path(path).read_text() if path and Path(path).exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        error = lines[-1] if lines else "its process died"
        self.ledger.append("error", trial.trial_id, error=error)
        self._say(trial, f"failed: {error}")

    def _end(self, trial: Trial, status: str, **fields: Any) -> None:
        self.ledger.append("end", trial.trial_id, status=status, **fields)
        ended = sum(record.status != "running" for record in self.ledger.trials.values())
        self._say(trial, f"{status} ({ended} of {self._job.trial_count} trials)")

    def _say(self, trial: Trial, message: str) -> None:
        console = self._console or Console(stderr=True)
        console.print(f"{trial.trial_id}: {message}", highlight=False, soft_wrap=True)


def start_model(job: TuneJob, connect: Connect = already) -> Path:
    """The model that trials of the job, as it was given, start from; runs the stages before the
    tried one, if any."""
    resolved = absolute(job)
    base = {"output_dir": str(Path(resolved.output_dir) / "base")}
    before = {name: s for name, s in job.train.stages.items() if name != job.stage_name}
    if not before:
        return initial_model(resolved.train.model_copy(update=base))
    cached = {"cache_dir": resolved.train.data.cache_dir}
    data = {"data": job.train.data.model_copy(update=cached)}
    result = run_training(job.train.model_copy(update=base | data | {"stages": before}), connect)
    return list(result.models.values())[-1]


def _claim(job: TuneJob, given: TuneJob) -> None:
    """Claim the directory for this sweep, whose paths are absolute, and which was given with
    others. Raises TrainingError if it belongs to another."""
    path = Path(job.output_dir) / "sweep.json"
    tables = {"job": job.model_dump(mode="json"), "given": given.model_dump(mode="json")}

    def deciding(job: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that trials depend on, by key. Of the objectives that is only the score; how
        survivors generate may change, and is then measured again."""
        weight = job["objectives"]["clean_ce_weight"]
        others = {key: value for key, value in job.items() if key != "objectives"}
        return others | {"objectives.clean_ce_weight": weight}

    if path.exists():
        known = json.loads(path.read_text())
        forms = [(deciding(known[f]), deciding(now)) for f, now in tables.items() if f in known]
        if changed := changed_in_all(forms):
            raise TrainingError(
                f"{job.output_dir} holds another sweep, with another {', '.join(changed)}. "
                "Choose another output_dir, or delete this one to start afresh"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(tables | {"provenance": provenance()}, indent=1))
