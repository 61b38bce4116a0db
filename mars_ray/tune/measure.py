"""Evaluation by generation of the survivors: trials that no other beats in teacher-forced measures.

Those measures are cheap. Each survivor is evaluated once, by a task of its own on the cluster; a
resumed sweep does not repeat it.
"""

from pathlib import Path

import ray
from ray.exceptions import RayTaskError
from rich.console import Console

from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.config.tune import Objectives, TuneJob
from mars_ray.core.frontier import (
    FRONTIER_FILE,
    Frontier,
    FrontierPoint,
    read_frontier,
    undominated,
)
from mars_ray.decode.request import check_context
from mars_ray.errors import ConfigError, MarsError, TrainingError
from mars_ray.evaluate.run import is_whole, prompts_of, run_evaluation
from mars_ray.evaluate.tasks import Problem
from mars_ray.model.load import load_tokenizer, read_config
from mars_ray.progress import Bars
from mars_ray.tune.ledger import Ledger, TrialRecord

# Name of the model that all trials started from, which is measured too.
START = "start"


def survivors(ledger: Ledger, objectives: Objectives) -> list[TrialRecord]:
    """Finished trials that no other beats in both expected T/F and clean loss, best score first."""
    finished = [trial for trial in ledger.trials.values() if trial.status == "finished"]
    front = undominated(finished, _cheap_gains)
    return sorted(front, key=lambda trial: -trial.score)[: objectives.max_survivors]


def check_room(job: TuneJob, problems: list[Problem], start_model: Path) -> None:
    """Raises ConfigError if a problem has no room for its answer, before trials are trained that
    could not be measured."""
    objectives = job.objectives
    check_context(objectives.engine.max_context, read_config(start_model))
    prompts = prompts_of(problems, load_tokenizer(start_model))
    needed = max(map(len, prompts)) + objectives.max_new_tokens
    if needed > objectives.engine.max_context:
        raise ConfigError(
            f"objectives.engine.max_context {objectives.engine.max_context} is too small: the "
            f"longest prompt and its answer take {needed} tokens; set it to that at least, or "
            "lower objectives.max_new_tokens"
        )


def measure(
    job: TuneJob, trials: list[TrialRecord], start_model: Path, console: Console
) -> dict[str, Frontier]:
    """The frontier of each trial's model, and of the starting model's mode `exact`, by trial id.

    Raises MarsError.
    """
    output_dir = Path(job.output_dir)
    exact, verified = (ExactMode(),), tuple(_modes(job.objectives))
    jobs = {START: _job(job, START, start_model, exact)}
    for trial in trials:
        assert trial.model is not None
        jobs[trial.trial] = _job(job, trial.trial, output_dir / trial.model, verified)
    missing = {name: each for name, each in jobs.items() if not _is_measured(each)}
    console.print(f"generating with {len(missing)} of {len(jobs)} models")
    evaluate = ray.remote(num_cpus=1, num_gpus=_gpus(job), max_retries=job.retries)(_evaluate)
    waiting = [evaluate.remote(each) for each in missing.values()]
    with Bars(console) as bars:
        task = bars.add_task("models that have generated", total=len(waiting))
        while waiting:
            done, waiting = ray.wait(waiting)
            _raise_failure(done)
            bars.advance(task)
    return {name: read_frontier(each.output_dir or "") for name, each in jobs.items()}


def _raise_failure(done: list[ray.ObjectRef]) -> None:
    """Raise the error of a failed task; Ray's own error hides it behind the worker's traceback."""
    try:
        ray.get(done)
    except RayTaskError as error:
        if isinstance(error.cause, MarsError):
            raise error.cause from None
        raise


def _gpus(job: TuneJob) -> float:
    """GPUs of a task that generates; 0 if the trials have none either."""
    on_cpu = job.objectives.engine.device == "cpu"
    return 0 if on_cpu else min(1, job.train.cluster.gpus_per_worker)


def fastest(frontier: Frontier, objectives: Objectives) -> FrontierPoint:
    """The point with most T/F of those that cost at most the stated loss against `exact`."""
    least = frontier.points[0].accuracy - objectives.max_accuracy_loss
    # A tolerance for rounding, because accuracies are shares of a count.
    kept = [point for point in frontier.points if point.accuracy >= least - 1e-9]
    return max(kept, key=lambda point: point.tokens_per_forward)


def best(
    frontiers: dict[str, Frontier], objectives: Objectives, trials: list[TrialRecord]
) -> TrialRecord:
    """The fastest trial whose accuracy in `exact` is at most the stated loss below the starting
    model's; without one, the most accurate. Raises TrainingError if no trial has finished."""
    if not trials:
        raise TrainingError("no trial has finished, so none is best; see trials.jsonl")
    least = frontiers[START].points[0].accuracy - objectives.max_accuracy_loss
    good = [trial for trial in trials if _accuracy(frontiers[trial.trial]) >= least - 1e-9]
    if not good:
        return max(trials, key=lambda trial: _accuracy(frontiers[trial.trial]))
    speeds = {t.trial: fastest(frontiers[t.trial], objectives).tokens_per_forward for t in good}
    return max(good, key=lambda trial: speeds[trial.trial])


def _accuracy(frontier: Frontier) -> float:
    return frontier.points[0].accuracy


def _cheap_gains(trial: TrialRecord) -> tuple[float, ...]:
    return trial.metrics["tokens_per_forward"], -trial.metrics["clean_ce"]


def _modes(objectives: Objectives) -> list[Mode]:
    groups = objectives.groups
    return [VerifiedMode(threshold=value, groups=groups) for value in objectives.thresholds]


def _job(job: TuneJob, name: str, model: Path, modes: tuple[Mode, ...]) -> EvaluateJob:
    return EvaluateJob(
        checkpoint=str(model),
        output_dir=str(Path(job.output_dir) / "frontiers" / name),
        task=job.objectives.task,
        modes=modes,
        max_new_tokens=job.objectives.max_new_tokens,
        engine=job.objectives.engine,
    )


def _is_measured(job: EvaluateJob) -> bool:
    """Whether there is a whole frontier of this job; the objectives may have changed since."""
    assert job.output_dir is not None
    if not (Path(job.output_dir) / FRONTIER_FILE).exists():
        return False
    frontier = read_frontier(job.output_dir)
    return is_whole(frontier) and frontier.provenance.get("job") == job.model_dump(mode="json")


def _evaluate(job: EvaluateJob) -> None:
    run_evaluation(job, Console(quiet=True))
