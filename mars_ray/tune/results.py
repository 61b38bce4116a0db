"""The results of a sweep: survivors evaluated by generation, and one row per trial, as JSON, as
Parquet, as a table and as a plot.

Survivors are the finished trials, or if they are many those that no other beats in teacher-forced
measures, which are cheap. Each is evaluated once, by a task of its own on the cluster; a resumed
sweep does not repeat it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import ray
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ray.exceptions import RayTaskError
from rich.console import Console
from rich.table import Table

from mars_ray.cluster.connection import cluster_gpus, gpus_each
from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.modes import ExactMode, Mode
from mars_ray.config.tune import Objectives, TuneJob
from mars_ray.core.frontier import (
    Frontier,
    FrontierPoint,
    mode_label,
    read_frontier,
    undominated,
)
from mars_ray.decode.kv_cache import model_context
from mars_ray.decode.request import check_context
from mars_ray.errors import MarsError, TrainingError
from mars_ray.evaluate import bench
from mars_ray.evaluate.run import run_evaluation, written
from mars_ray.evaluate.tasks import Problem, prompts_of
from mars_ray.files import replaced, write_whole
from mars_ray.model.load import load_tokenizer, read_config
from mars_ray.page import plain
from mars_ray.progress import Bars
from mars_ray.provenance import provenance
from mars_ray.train import checkpoint
from mars_ray.train.plan import absolute_path
from mars_ray.tune.search import Ledger, TrialRecord

# Name of the model that all trials started from, which is measured too.
START = "start"
# Okabe and Ito's, but for the grey.
_STOPPED, _FINISHED, _BEST = "#999999", "#0072B2", "#D55E00"


def survivors(ledger: Ledger, objectives: Objectives) -> list[TrialRecord]:
    """Finished trials, best score first; if they are too many, those that no other beats in both
    expected T/F and clean loss."""
    kept = [trial for trial in ledger.trials.values() if trial.status == "finished"]
    if len(kept) > objectives.max_survivors:
        kept = undominated(
            kept, lambda trial: (trial.metrics["tokens_per_forward"], -trial.metrics["clean_ce"])
        )
    return sorted(kept, key=lambda trial: -trial.score)[: objectives.max_survivors]


def check_room(job: TuneJob, problems: list[Problem], start_model: Path) -> None:
    """Raises ConfigError if a problem has no room for its answer, before trials are trained that
    could not be measured."""
    objectives = job.objectives
    config = read_config(start_model)
    check_context(objectives.engine.max_context, config)
    context = objectives.engine.max_context or model_context(config)
    prompts = prompts_of(problems, load_tokenizer(start_model))
    needed = max(map(len, prompts)) + objectives.max_new_tokens
    bench.check_room(needed, context, "objectives.engine.max_context")


def measure(
    job: TuneJob, trials: list[TrialRecord], start_model: Path, console: Console
) -> dict[str, Frontier]:
    """The frontier of each trial's model, and of the starting model's mode `exact`, by trial id.

    Raises MarsError.
    """
    output_dir = Path(job.output_dir)
    asked = job.objectives
    jobs = {START: _evaluation(job, START, start_model, (ExactMode(),))}
    for trial in trials:
        assert trial.model is not None
        jobs[trial.trial] = _evaluation(job, trial.trial, output_dir / trial.model, asked.modes)
    missing = {name: each for name, each in jobs.items() if not written(each)}
    console.print(f"generating with {len(missing)} of {len(jobs)} models")
    gpus = 0.0
    if asked.engine.device != "cpu":
        gpus = min(1, gpus_each(job.train.cluster.gpus_per_worker, cluster_gpus()))
    evaluate = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=job.retries)(_evaluate)
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


def fastest(frontier: Frontier, objectives: Objectives) -> FrontierPoint:
    """The point with most T/F of those that cost at most the stated loss against `exact`."""
    # A tolerance for rounding, because accuracies are shares of a count.
    most = 100 * objectives.max_accuracy_loss + 1e-9
    kept = [point for point in frontier.points if point.points_lost <= most]
    return max(kept, key=lambda point: point.tokens_per_forward)


def best(
    frontiers: dict[str, Frontier], objectives: Objectives, trials: list[TrialRecord]
) -> TrialRecord:
    """The fastest trial whose accuracy in `exact` is at most the stated loss below the starting
    model's; without one, the most accurate. Where the task has no reference answers a model that
    repeats itself would be fastest, so there the clean loss counts as it does in the score.

    Raises TrainingError if no trial has finished.
    """
    if not trials:
        raise TrainingError("no trial has finished, so none is best; see trials.jsonl")
    if not frontiers[START].points[0].has_references:
        return max(
            trials,
            key=lambda trial: (
                fastest(frontiers[trial.trial], objectives).tokens_per_forward
                - objectives.clean_ce_weight * trial.metrics["clean_ce"]
            ),
        )
    accuracy = {name: frontier.points[0].accuracy for name, frontier in frontiers.items()}
    least = accuracy[START] - objectives.max_accuracy_loss
    good = [trial for trial in trials if accuracy[trial.trial] >= least - 1e-9]
    if not good:
        return max(trials, key=lambda trial: accuracy[trial.trial])
    speeds = {t.trial: fastest(frontiers[t.trial], objectives).tokens_per_forward for t in good}
    return max(good, key=lambda trial: speeds[trial.trial])


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
    mode: str | None  # of the fastest point that keeps quality
    threshold: float | None  # of the same point; None if that is `exact`
    points_lost: float | None  # of the same point
    tokens_per_forward: float | None
    tokens_per_forward_lossless: float | None
    attempts_failed: int
    error: str | None  # from the last failed attempt
    values: dict[str, Any]


def rows_of(
    job: TuneJob, ledger: Ledger, frontiers: dict[str, Frontier], best: TrialRecord
) -> list[Row]:
    """All trials: the best first, then survivors, then by steps and score."""
    rows = []
    for trial in ledger.trials.values():
        frontier = frontiers.get(trial.trial)
        points = frontier.points if frontier else ()
        exact = points[0] if points else None
        speed = fastest(frontier, job.objectives) if frontier else None
        lossless = [
            point.tokens_per_forward
            for point in points
            if point.mode["type"] == "verified" and point.threshold == 1
        ]
        rows.append(
            Row(
                trial=trial.trial,
                status=trial.status,
                best=trial.trial == best.trial,
                steps=trial.steps,
                score=trial.score if trial.scores else None,
                tokens_per_forward_expected=trial.metrics.get("tokens_per_forward"),
                clean_ce=trial.metrics.get("clean_ce"),
                exact_accuracy=exact.accuracy if exact else None,
                exact_accuracy_low=exact.accuracy_low if exact else None,
                exact_accuracy_high=exact.accuracy_high if exact else None,
                mode=mode_label(speed.mode) if speed else None,
                threshold=speed.threshold if speed else None,
                points_lost=speed.points_lost if speed else None,
                tokens_per_forward=speed.tokens_per_forward if speed else None,
                tokens_per_forward_lossless=max(lossless, default=None),
                attempts_failed=len(trial.errors),
                error=trial.errors[-1] if trial.errors else None,
                values=trial.values,
            )
        )

    def rank(row: Row) -> tuple[float, ...]:
        score = float("-inf") if row.score is None else row.score
        return row.best, row.tokens_per_forward or 0, row.steps, score

    return sorted(rows, key=rank, reverse=True)


def summary_of(job: TuneJob, rows: list[Row], frontiers: dict[str, Frontier]) -> dict[str, Any]:
    """A summary of the sweep in a few numbers."""
    trained = 0
    for row in rows:
        # Up to the last checkpoint: a run continues while Tune decides to end it.
        directory = Path(absolute_path(job.output_dir)) / "trials" / row.trial
        found = map(checkpoint.newest, directory.glob(f"*/stages/{job.stage_name}"))
        trained += max([row.steps, *(checkpoint.step_of(path) for path in found if path)])
    statuses = [row.status for row in rows]
    return {
        "trials": len(rows),
        **{status: statuses.count(status) for status in ("finished", "stopped", "failed")},
        "attempts_failed": sum(row.attempts_failed for row in rows),
        "steps_trained": trained,
        "start_exact_accuracy": frontiers[START].points[0].accuracy,
        "best": asdict(rows[0]),
    }


def write_results(directory: Path, job: TuneJob, rows: list[Row], summary: dict[str, Any]) -> None:
    """Write `results.json` and `results.parquet`; in the latter, settings are columns."""
    table = {"summary": summary, "trials": [asdict(row) for row in rows]}
    table |= {"job": job.model_dump(mode="json"), "provenance": provenance()}
    write_whole(directory / "results.json", json.dumps(table, indent=1) + "\n")
    # Each column has one type: numbers, or else JSON.
    settings = [(key, value) for row in rows for key, value in row.values.items()]
    other = {key for key, value in settings if type(value) not in (int, float)}
    flat = [
        {name: value for name, value in asdict(row).items() if name != "values"}
        | {key: json.dumps(v) if key in other else float(v) for key, v in row.values.items()}
        for row in rows
    ]
    with replaced(directory / "results.parquet") as draft:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat), draft)


def plot_sweep(
    rows: list[Row], frontiers: dict[str, Frontier], objectives: Objectives, path: Path
) -> None:
    """Draw two panels. Left, teacher-forced: clean loss against expected T/F. Right, generated:
    accuracy in `exact` against T/F, with 95% intervals; the line is the common starting model."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    cheap, generated = figure.subplots(1, 2)
    _draw_cheap(cheap, [row for row in rows if row.clean_ce is not None])
    _draw_generated(generated, rows, frontiers, objectives)
    for axes in (cheap, generated):
        plain(axes)
        axes.legend(frameon=False, loc="best", fontsize=9)
    figure.savefig(path, dpi=120)


def _draw_cheap(axes: Axes, rows: list[Row]) -> None:
    ended = [row for row in rows if row.status == "finished"]
    groups = (
        ("stopped early", _STOPPED, [row for row in rows if row.status != "finished"]),
        ("finished", _FINISHED, [row for row in ended if not row.best]),
        ("best", _BEST, [row for row in ended if row.best]),
    )
    for label, colour, group in groups:
        x: list[Any] = [row.tokens_per_forward_expected for row in group]
        y: list[Any] = [row.clean_ce for row in group]
        axes.scatter(x, y, s=36, color=colour, label=f"{label} ({len(group)})")
    for row in rows:
        if row.exact_accuracy is not None:
            here = (row.tokens_per_forward_expected, row.clean_ce)
            label = row.trial.rpartition("_")[2]
            axes.annotate(label, here, xytext=(5, 4), textcoords="offset points", fontsize=9)
    axes.set_yscale("log")
    axes.invert_yaxis()
    axes.set_xlabel("expected tokens per forward (teacher-forced)")
    axes.set_ylabel("held-out loss of the clean stream, nats (less is up)")
    axes.set_title("All trials, at their last evaluation")


def _draw_generated(
    axes: Axes, rows: list[Row], frontiers: dict[str, Frontier], objectives: Objectives
) -> None:
    start = frontiers[START].points[0]
    axes.axhspan(start.accuracy_low, start.accuracy_high, color="#000000", alpha=0.06, lw=0)
    axes.axhline(start.accuracy, color="#000000", lw=0.8, ls=":", label="before the stage")
    for row in rows:
        if row.trial not in frontiers:
            continue
        exact, speed = frontiers[row.trial].points[0], fastest(frontiers[row.trial], objectives)
        colour = _BEST if row.best else _FINISHED
        below, above = exact.accuracy - exact.accuracy_low, exact.accuracy_high - exact.accuracy
        here = (speed.tokens_per_forward, exact.accuracy)
        axes.errorbar(*here, yerr=[[below], [above]], color=colour, marker="o", capsize=2)
        label = f"{row.trial.rpartition('_')[2]} ({speed.label})"
        axes.annotate(label, here, xytext=(5, 4), textcoords="offset points", fontsize=9)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("tokens per forward, generated, in the mode that keeps quality")
    axes.set_ylabel("accuracy in mode exact")
    axes.set_title(f"Survivors, {start.problems} problems")


def print_rows(job: TuneJob, rows: list[Row], console: Console) -> None:
    """Print one line per trial; settings are named by the last part of their keys."""
    table = Table(title=f"{len(rows)} trials of stage {job.stage_name}")
    for name in ("trial", "status"):
        table.add_column(name)
    for name in ("steps", "expected T/F", "clean", "exact", "T/F (mode)"):
        table.add_column(name, justify="right")
    table.add_column("settings", overflow="fold", ratio=1)
    for row in rows:
        speed = _number(row.tokens_per_forward, ".2f")
        if row.mode is not None:
            speed += f" ({row.mode})"
        table.add_row(
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
            style="bold" if row.best else None,
        )
    console.print(table)
    for row in rows:
        if row.error:
            console.print(
                f"{row.trial}: {row.attempts_failed} failed, last: {row.error}", markup=False
            )


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
