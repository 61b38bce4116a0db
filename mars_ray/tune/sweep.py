"""The whole sweep: trials, then generation by the survivors, then files for people and programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from mars_ray.config.tune import TuneJob
from mars_ray.core.frontier import Frontier
from mars_ray.evaluate.plots import TrialPoint, plot_sweep
from mars_ray.files import replaced, sole_writer
from mars_ray.tune.ledger import TrialRecord
from mars_ray.tune.measure import START, best, fastest, measure, survivors
from mars_ray.tune.results import Row, rows_of, summary_of, write_results
from mars_ray.tune.run import absolute, run_trials, start_model
from mars_ray.tune.space import trial_job

PLOT_FILE = "pareto.png"
BEST_FILE = "best.toml"


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep that has ended."""

    job: TuneJob
    rows: list[Row]
    summary: dict[str, Any]


def run_sweep(job: TuneJob, console: Console) -> Sweep:
    """Run, measure and write a sweep; the same call resumes one. Ray must be connected.

    Raises MarsError.
    """
    resolved = absolute(job)
    directory = Path(resolved.output_dir)
    with sole_writer(directory, directory / ".lock", "output_dir"):
        return _run(job, resolved, console)


def _run(job: TuneJob, resolved: TuneJob, console: Console) -> Sweep:
    ledger = run_trials(job, console)
    kept = survivors(ledger, job.objectives)
    frontiers = measure(resolved, kept, start_model(resolved), console)
    chosen = best(frontiers, job.objectives, kept)
    rows = rows_of(job, ledger, frontiers, chosen)
    sweep = Sweep(job, rows, summary_of(job, rows, frontiers))
    directory = Path(resolved.output_dir)
    write_results(directory, job, rows, sweep.summary)
    trials = [trial for trial in ledger.trials.values() if trial.metrics]
    points = [_point(job, trial, frontiers.get(trial.trial), trial is chosen) for trial in trials]
    with replaced(directory / PLOT_FILE) as draft:
        plot_sweep(points, frontiers[START].points[0], draft)
    _write_best(job, chosen, directory / BEST_FILE)
    return sweep


def _point(job: TuneJob, trial: TrialRecord, frontier: Frontier | None, chosen: bool) -> TrialPoint:
    return TrialPoint(
        label=trial.trial.rpartition("_")[2],
        finished=trial.status == "finished",
        expected_tokens_per_forward=trial.metrics["tokens_per_forward"],
        clean_ce=trial.metrics["clean_ce"],
        exact=frontier.points[0] if frontier else None,
        fastest=fastest(frontier, job.objectives) if frontier else None,
        best=chosen,
    )


def _write_best(job: TuneJob, chosen: TrialRecord, path: Path) -> None:
    """The best trial's settings as a job that `mars-ray train` takes."""
    table = trial_job(job, chosen.values).model_dump(mode="json", exclude_none=True)
    header = f"# The best of {job.trials} trials: {chosen.trial}.\n"
    with replaced(path) as draft:
        draft.write_text(header + tomli_w.dumps(table), encoding="utf-8")
