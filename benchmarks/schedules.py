"""Mask schedules side by side: the same stage with other settings, at equal steps and seeds.

    python benchmarks/schedules.py benchmarks/schedules.toml OUTPUT.json --seeds 0 1 2

Each run trains on one thread and answers the same held-out problems in `exact` and `verified`. A
run that is in OUTPUT.json is not repeated, so an interrupted comparison can continue. The first
variant is the reference for the others. `--variants` selects some of them, and `--best JOB.toml`
adds a training job such as a sweep's best.toml.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lib.tables import difference
from rich.console import Console
from rich.table import Table

from mars_ray.config.decode import EngineConfig
from mars_ray.config.evaluate import CorpusTask, EvaluateJob
from mars_ray.config.load import load_job, parse_job, put_value, read_toml
from mars_ray.config.modes import VerifiedMode
from mars_ray.config.train import TrainJob
from mars_ray.config.tune import TuneJob
from mars_ray.core.frontier import Frontier
from mars_ray.evaluate.run import run_evaluation
from mars_ray.provenance import provenance
from mars_ray.train.checkpoint import MODEL
from mars_ray.train.loop import StageOutcome
from mars_ray.train.plan import initial_model, stage_plan, with_absolute_paths
from mars_ray.train.ranks import Ranks
from mars_ray.train.worker import train_stage

# Student's t for a two-sided 95% interval, by degrees of freedom.
_T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
_MEASURES = (
    "tokens_per_forward",
    "tokens_per_forward_all_outcomes",
    "exact_accuracy",
    "expected_tokens_per_forward",
    "clean_ce",
)


def main() -> None:
    """Do the missing runs, then write and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--variants", nargs="+")
    parser.add_argument("--best", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plan = read_toml(arguments.plan)
    jobs = variants(plan, arguments.variants, arguments.best)
    runs = json.loads(arguments.output.read_text())["runs"] if arguments.output.exists() else []
    console = Console(width=120)
    for seed in arguments.seeds:
        for name, job in jobs.items():
            if not any(run["variant"] == name and run["seed"] == seed for run in runs):
                console.print(f"{name}, seed {seed}")
                runs.append({"variant": name, "seed": seed, **run_one(job, seed, plan)})
                write(arguments.output, runs, plan, jobs)
    write(arguments.output, runs, plan, jobs)
    show(compare(runs), console)


def variants(
    plan: dict[str, Any], names: list[str] | None, best: Path | None
) -> dict[str, TrainJob]:
    """The training jobs by name; the first one is the reference."""
    base = load_job(plan["base"])
    assert isinstance(base, TuneJob)
    jobs = {}
    for name, changes in plan["variants"].items():
        if names is None or name in names:
            jobs[name] = changed(base, changes)
    if best is not None:
        job = load_job(best)
        assert isinstance(job, TrainJob)
        jobs["best-of-sweep"] = job
    return jobs


def changed(base: TuneJob, changes: dict[str, Any]) -> TrainJob:
    """The base job with these settings of the stage or of the data."""
    table = json.loads(base.train.model_dump_json(exclude_none=True))
    for key, value in changes.items():
        prefix = [] if key.startswith("data.") else ["stages", base.stage_name]
        put_value(table, [*prefix, *key.split(".")], value, key)
    job = parse_job(table, source="variant")
    assert isinstance(job, TrainJob)
    return job


def run_one(job: TrainJob, seed: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Train one variant and generate with it; returns the record of the run."""
    with tempfile.TemporaryDirectory() as directory:
        job = job.model_copy(update={"seed": seed, "output_dir": directory})
        job = with_absolute_paths(job)
        stage = list(job.stages)[-1]
        work = stage_plan(job, stage, initial_model(job))
        started = time.perf_counter()
        outcome = train_stage(work, Ranks.current(torch.device("cpu")), None, lambda *_: None)
        assert isinstance(outcome, StageOutcome), outcome
        seconds = time.perf_counter() - started
        frontier = generate(outcome.checkpoint / MODEL, Path(directory), plan)
    exact, verified, everywhere = frontier.points
    return {
        "tokens_per_forward": verified.tokens_per_forward,
        "tokens_per_forward_all_outcomes": everywhere.tokens_per_forward,
        "identical": verified.identical,
        "exact_accuracy": exact.accuracy,
        "exact_interval": [exact.accuracy_low, exact.accuracy_high],
        "expected_tokens_per_forward": outcome.metrics["eval_tokens_per_forward"],
        "clean_ce": outcome.metrics["eval_clean_ce"],
        "steps": outcome.step,
        "seconds": round(seconds, 1),
    }


def generate(model: Path, directory: Path, plan: dict[str, Any]) -> Frontier:
    """The frontier of `exact`, and of `verified` at threshold 1 with masks behind all drafts or for
    every outcome."""
    job = EvaluateJob(
        checkpoint=str(model),
        output_dir=str(directory / "frontier"),
        task=CorpusTask(count=plan["problems"], seed=plan["problem_seed"]),
        modes=(VerifiedMode(), VerifiedMode(groups=65)),
        max_new_tokens=plan["max_new_tokens"],
        engine=EngineConfig(max_batch=16, max_context=256, threads=1),
    )
    return run_evaluation(job, Console(quiet=True)).frontier


def compare(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds by variant, and paired differences from the first variant with intervals."""
    reference = {run["seed"]: run for run in runs if run["variant"] == runs[0]["variant"]}
    rows = []
    for name in dict.fromkeys(run["variant"] for run in runs):
        mine = [run for run in runs if run["variant"] == name and run["seed"] in reference]
        row: dict[str, Any] = {"variant": name, "seeds": sorted(run["seed"] for run in mine)}
        for measure in _MEASURES:
            differences = [run[measure] - reference[run["seed"]][measure] for run in mine]
            row[measure] = statistics.fmean(run[measure] for run in mine)
            row[f"{measure}_difference"] = statistics.fmean(differences)
            row[f"{measure}_half_width"] = half_width(differences)
        rows.append(row)
    return rows


def half_width(values: list[float]) -> float | None:
    """Half the width of the 95% interval of the values' mean; None for one value."""
    if len(values) < 2:
        return None
    return _T_95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5


def write(
    output: Path, runs: list[dict[str, Any]], plan: dict[str, Any], jobs: dict[str, TrainJob]
) -> None:
    """Write all runs, the comparison, and the settings that were compared."""
    settings = {
        name: job.model_dump(mode="json", include={"data", "stages"}) for name, job in jobs.items()
    }
    before = json.loads(output.read_text())["settings"] if output.exists() else {}
    table = {"plan": plan, "comparison": compare(runs), "runs": runs}
    table |= {"settings": before | settings, "provenance": provenance()}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(table, indent=1) + "\n")


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print one line per variant."""
    table = Table(title=f"against {rows[0]['variant']}, 95% intervals over seeds")
    columns = ("variant", "seeds", "T/F", "difference", "all outcomes", "difference")
    for column in (*columns, "exact", "difference", "clean loss"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for row in rows:
        table.add_row(
            row["variant"],
            str(len(row["seeds"])),
            f"{row['tokens_per_forward']:.3f}",
            difference(row, "tokens_per_forward", "+.3f"),
            f"{row['tokens_per_forward_all_outcomes']:.3f}",
            difference(row, "tokens_per_forward_all_outcomes", "+.3f"),
            f"{row['exact_accuracy']:.1%}",
            difference(row, "exact_accuracy", "+.1%"),
            f"{row['clean_ce']:.4f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
