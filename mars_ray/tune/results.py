"""The results of a sweep: survivors evaluated by generation, and one row per trial, as JSON, as
Parquet and as a table.

Survivors are the trials that no other beats in teacher-forced measures, which are cheap. Each is
evaluated once, by a task of its own on the cluster; a resumed sweep does not repeat it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import ray
from ray.exceptions import RayTaskError
from rich.console import Console
from rich.table import Table

from mars_ray.cluster.connection import cluster_gpus, gpus_each
from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.config.tune import Objectives, TuneJob
from mars_ray.core.frontier import (
    Frontier,
    FrontierPoint,
    read_frontier,
    undominated,
)
from mars_ray.decode.kv_cache import model_context
from mars_ray.decode.request import check_context
from mars_ray.errors import ConfigError, MarsError, TrainingError
from mars_ray.evaluate.run import run_evaluation, written
from mars_ray.evaluate.tasks import Problem, prompts_of
from mars_ray.files import replaced, write_whole
from mars_ray.model.load import load_tokenizer, read_config
from mars_ray.progress import Bars
from mars_ray.provenance import provenance
from mars_ray.train import checkpoint
from mars_ray.train.plan import absolute_path
from mars_ray.tune.search import Ledger, TrialRecord

# Name of the model that all trials started from, which is measured too.
START = "start"
_STATUSES = ("finished", "stopped", "failed")


def survivors(ledger: Ledger, objectives: Objectives) -> list[TrialRecord]:
    """Finished trials that no other beats in both expected T/F and clean loss, best score first."""
    finished = [trial for trial in ledger.trials.values() if trial.status == "finished"]
    front = undominated(
        finished, lambda trial: (trial.metrics["tokens_per_forward"], -trial.metrics["clean_ce"])
    )
    return sorted(front, key=lambda trial: -trial.score)[: objectives.max_survivors]


def check_room(job: TuneJob, problems: list[Problem], start_model: Path) -> None:
    """Raises ConfigError if a problem has no room for its answer, before trials are trained that
    could not be measured."""
    objectives = job.objectives
    config = read_config(start_model)
    check_context(objectives.engine.max_context, config)
    context = objectives.engine.max_context or model_context(config)
    prompts = prompts_of(problems, load_tokenizer(start_model))
    needed = max(map(len, prompts)) + objectives.max_new_tokens
    if needed > context:
        raise ConfigError(
            f"objectives.engine.max_context {context} is too small: the longest prompt and its "
            f"answer take {needed} tokens; set it to that at least, or lower "
            "objectives.max_new_tokens"
        )


def measure(
    job: TuneJob, trials: list[TrialRecord], start_model: Path, console: Console
) -> dict[str, Frontier]:
    """The frontier of each trial's model, and of the starting model's mode `exact`, by trial id.

    Raises MarsError.
    """
    output_dir = Path(job.output_dir)
    asked = job.objectives
    verified = tuple(VerifiedMode(threshold=t, groups=asked.groups) for t in asked.thresholds)
    jobs = {START: _evaluation(job, START, start_model, (ExactMode(),))}
    for trial in trials:
        assert trial.model is not None
        jobs[trial.trial] = _evaluation(job, trial.trial, output_dir / trial.model, verified)
    missing = {name: each for name, each in jobs.items() if not written(each)}
    console.print(f"generating with {len(missing)} of {len(jobs)} models")
    evaluate = ray.remote(num_cpus=1, num_gpus=_gpus(job), max_retries=job.retries)(_evaluate)
    waiting = [evaluate.remote(each) for each in missing.values()]
    with Bars(console) as bars:
        task = bars.add_task("models that have generated", total=len(waiting))
        while waiting:
            done, waiting = ray.wait(waiting)
            try:
                ray.get(done)
            except RayTaskError as error:
                # Ray's own error hides the cause behind the worker's traceback.
                if isinstance(error.cause, MarsError):
                    raise error.cause from None
                raise
            bars.advance(task)
    return {name: read_frontier(each.output_dir or "") for name, each in jobs.items()}


def _gpus(job: TuneJob) -> float:
    """GPUs of a task that generates; 0 if the trials have none either."""
    on_cpu = job.objectives.engine.device == "cpu"
    return 0 if on_cpu else min(1, gpus_each(job.train.cluster.gpus_per_worker, cluster_gpus()))


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


def _evaluation(job: TuneJob, name: str, model: Path, modes: tuple[Mode, ...]) -> EvaluateJob:
    return EvaluateJob(
        checkpoint=str(model),
        output_dir=str(Path(job.output_dir) / "frontiers" / name),
        task=job.objectives.task,
        modes=modes,
        max_new_tokens=job.objectives.max_new_tokens,
        engine=job.objectives.engine,
    )


def _evaluate(job: EvaluateJob) -> None:
    run_evaluation(job, Console(quiet=True))


@dataclass(frozen=True, slots=True)
class Row:
    """The results of a trial. Fields that it did not reach are None: only survivors generate."""

    trial: str
    status: str
    best: bool
    steps: int
    score: float | None
    tokens_per_forward_expected: float | None
    clean_ce: float | None
    exact_accuracy: float | None
    exact_accuracy_low: float | None
    exact_accuracy_high: float | None
    threshold: float | None  # of the fastest point that keeps quality; None if that is `exact`
    threshold_accuracy: float | None
    tokens_per_forward: float | None  # of the same point
    tokens_per_forward_lossless: float | None
    attempts_failed: int
    error: str | None  # from the last failed attempt
    values: dict[str, Any]


def rows_of(
    job: TuneJob, ledger: Ledger, frontiers: dict[str, Frontier], best: TrialRecord
) -> list[Row]:
    """All trials: the best first, then survivors, then by steps and score."""
    trials = ledger.trials.values()
    rows = [_row(job, t, frontiers.get(t.trial), t.trial == best.trial) for t in trials]
    return sorted(rows, key=_rank, reverse=True)


def summary_of(job: TuneJob, rows: list[Row], frontiers: dict[str, Frontier]) -> dict[str, Any]:
    """A summary of the sweep in a few numbers."""
    assert job.stage.steps is not None
    trained = sum(_trained_steps(job, row) for row in rows)
    counts = {status: sum(row.status == status for row in rows) for status in _STATUSES}
    return {
        "trials": len(rows),
        **counts,
        "attempts_failed": sum(row.attempts_failed for row in rows),
        "steps_trained": trained,
        "steps_if_all_ran_to_the_end": job.trials * job.stage.steps,
        "steps_saved_factor": round(job.trials * job.stage.steps / max(1, trained), 2),
        "start_exact_accuracy": frontiers[START].points[0].accuracy,
        "best": asdict(rows[0]),
    }


def write_results(directory: Path, job: TuneJob, rows: list[Row], summary: dict[str, Any]) -> None:
    """Write `results.json` and `results.parquet`; in the latter, settings are columns."""
    table = {"summary": summary, "trials": [asdict(row) for row in rows]}
    table |= {"job": job.model_dump(mode="json"), "provenance": provenance()}
    write_whole(directory / "results.json", json.dumps(table, indent=1) + "\n")
    with replaced(directory / "results.parquet") as draft:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_flat(rows)), draft)


def print_rows(job: TuneJob, rows: list[Row], console: Console) -> None:
    """Print one line per trial; settings are named by the last part of their keys."""
    table = Table(title=f"{len(rows)} trials of stage {job.stage_name}")
    for name in ("trial", "status"):
        table.add_column(name)
    for name in ("steps", "expected T/F", "clean", "exact", "T/F (threshold)"):
        table.add_column(name, justify="right")
    table.add_column("settings", overflow="fold", ratio=1)
    for row in rows:
        table.add_row(*_cells(row), style="bold" if row.best else None)
    console.print(table)
    for row in rows:
        if row.error:
            console.print(
                f"{row.trial}: {row.attempts_failed} failed, last: {row.error}", markup=False
            )


def _trained_steps(job: TuneJob, row: Row) -> int:
    """Steps up to the trial's last checkpoint: a run continues while Tune decides to end it."""
    directory = Path(absolute_path(job.output_dir)) / "trials" / row.trial
    runs = directory.glob(f"*/stages/{job.stage_name}")
    found = [checkpoint.newest(run) for run in runs]
    return max([row.steps, *(checkpoint.step_of(path) for path in found if path)])


def _rank(row: Row) -> tuple[float, ...]:
    score = float("-inf") if row.score is None else row.score
    return row.best, row.tokens_per_forward or 0, row.steps, score


def _row(job: TuneJob, trial: TrialRecord, frontier: Frontier | None, best: bool) -> Row:
    exact = frontier.points[0] if frontier else None
    speed = fastest(frontier, job.objectives) if frontier else None
    points = frontier.points if frontier else ()
    lossless = [point.tokens_per_forward for point in points if point.threshold == 1]
    return Row(
        trial=trial.trial,
        status=trial.status,
        best=best,
        steps=trial.steps,
        score=trial.score if trial.scores else None,
        tokens_per_forward_expected=trial.metrics.get("tokens_per_forward"),
        clean_ce=trial.metrics.get("clean_ce"),
        exact_accuracy=exact.accuracy if exact else None,
        exact_accuracy_low=exact.accuracy_low if exact else None,
        exact_accuracy_high=exact.accuracy_high if exact else None,
        threshold=speed.threshold if speed else None,
        threshold_accuracy=speed.accuracy if speed else None,
        tokens_per_forward=speed.tokens_per_forward if speed else None,
        tokens_per_forward_lossless=lossless[0] if lossless else None,
        attempts_failed=len(trial.errors),
        error=trial.errors[-1] if trial.errors else None,
        values=trial.values,
    )


def _flat(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows with settings as columns, each of one type: numbers, or else JSON."""
    other = {
        key for row in rows for key, value in row.values.items() if type(value) not in (int, float)
    }
    return [
        {name: value for name, value in asdict(row).items() if name != "values"}
        | {key: json.dumps(v) if key in other else float(v) for key, v in row.values.items()}
        for row in rows
    ]


def _cells(row: Row) -> list[str]:
    speed = "" if row.tokens_per_forward is None else f"{row.tokens_per_forward:.2f}"
    if row.threshold is not None:
        speed += f" ({row.threshold:g})"
    return [
        row.trial.rpartition("_")[2],
        row.status,
        str(row.steps),
        _number(row.tokens_per_forward_expected, ".2f"),
        _number(row.clean_ce, ".4f"),
        _number(row.exact_accuracy, ".1%"),
        speed,
        ", ".join(
            f"{key.rpartition('.')[2].replace('_', ' ')} {_short(value)}"
            for key, value in row.values.items()
        ),
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return " ".join(_short(part) for part in value.values())
    if isinstance(value, list):
        return "/".join(_short(part) for part in value)
    return str(value)
