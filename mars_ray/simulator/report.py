"""`mars-ray simulate`: every policy in every cell with every seed, as a table, a page and JSON."""

import hashlib
import json
import secrets
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table as Printed

from mars_ray.autoscale.service_model import ServiceModel, contradiction, load_service_model
from mars_ray.files import ResultCache
from mars_ray.page import GREY, Part, Table, page, plain, svg
from mars_ray.provenance import provenance
from mars_ray.simulator.cases import Case, Cell, loaded, make_case, run, run_parts
from mars_ray.simulator.config import PolicyName, SimulateJob, Simulation
from mars_ray.simulator.engine.run import Outcome, Timeline, summarise

# What is kept of a run.
FIGURES = (
    "attainment",
    "mean_replicas",
    "replica_s",
    "points_lost",
    "effective_accuracy",
    "below_set_point_s",
    "in_time",
    "shed",
    "failed",
)
KEPT_FILE = "parts.jsonl"
# What a job may choose without a change in any run: more or fewer of them are needed.
_CHOSEN = {"name", "policies", "cold_starts_s"}
# Points of a timeline in the result, few enough to keep its file small.
_TICKS = 150
# Okabe and Ito's, of which more are needed than other pages have.
_COLOURS = ("#D55E00", "#009E73", "#56B4E9", "#000000", "#CC79A7", "#E69F00")
# 97.5% quantiles of Student's t by degrees of freedom; beyond the table, from the normal quantile.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_NORMAL = 1.959964

RESULT_FILE = "result.json"


def run_simulations(
    job: SimulateJob, console: Console, directory: Path | None = None, workers: int | None = None
) -> dict[str, Any]:
    """The result as JSON values.

    Finished runs are kept in the directory, and not simulated again for the same job and code.
    Workers are processes, by default one per core. Raises ConfigError or DataError.
    """
    model = load_service_model(job.service_model)
    warn_of_steps(job, model, console)
    cells = [Cell(t, r, cold) for t in job.traces for r in job.slos for cold in job.colds_s]
    # Loading all traces now shows at once if one is missing.
    cases = {cell: make_case(job, model, cell, job.seeds_of(cell.trace)[0]) for cell in cells}
    where = provenance()
    kept = ResultCache(
        directory / KEPT_FILE if directory else None, work_of(job, model, where, _CHOSEN)
    )
    calls: dict[str, Callable[[], Any]] = {
        _name(cell, policy, seed): partial(_run, job, model, cell, policy, seed)
        for cell in cells
        for policy in job.policies
        for seed in job.seeds_of(cell.trace)
    }
    made = run_parts(calls, kept, workers, console)
    return {
        "job": job.model_dump(mode="json"),
        "model": {"name": model.name, "provenance": model.provenance},
        "cells": [_row(job, cell, case, made) for cell, case in cases.items()],
        "timelines": _timelines(job, cells, made),
        "provenance": where,
    }


def warn_of_steps(job: Simulation, model: ServiceModel, console: Console) -> None:
    """Say where the job's own step size contradicts what it owes to requests."""
    if rows := job.cluster.step_tokens:
        for regime, slo in job.slos.items():
            if message := contradiction(model, rows, slo.time_per_token_s):
                console.print(f"cluster.step_tokens, {regime}: {message}", markup=False)


def work_of(job: Simulation, model: ServiceModel, where: dict[str, Any], chosen: set[str]) -> str:
    """A digest of all that a run's result depends on besides its name; not of what is `chosen`.
    Code with uncommitted changes has no name, so each run of it gets a different digest."""
    facts = job.model_dump(mode="json", exclude=chosen)
    code = [where["mars_ray"], where["commit"]]
    if str(where["commit"]).endswith("+"):
        code.append(secrets.token_hex())
    work = hashlib.sha256(json.dumps([facts, asdict(model), code], sort_keys=True).encode())
    for name, source in job.traces.items():  # their files may change
        trace = loaded(source, job.seeds_of(name)[0])
        for column in fields(trace)[1:]:
            work.update(np.ascontiguousarray(getattr(trace, column.name)).tobytes())
    return work.hexdigest()[:16]


def figures_of(outcome: Outcome, case: Case) -> dict[str, Any]:
    summary = summarise(outcome, case.slo, case.accuracy)
    summary["in_time"] = round(summary["attainment"] * summary["requests"])
    return {name: summary[name] for name in FIGURES}


def thinned(timeline: Timeline) -> dict[str, list[float]]:
    """The timeline as means over equal spans; for the threshold, the lowest value."""
    spans = np.array_split(np.arange(len(timeline.at_s)), min(_TICKS, len(timeline.at_s)))
    columns = {
        "at_s": [timeline.at_s[i[0]] for i in spans],
        "arrivals_per_s": [timeline.arrivals_per_s[i].mean() for i in spans],
        "ready": [timeline.ready[i].mean() for i in spans],
        "threshold": [timeline.threshold[i].min() for i in spans],
    }
    return {name: [round(float(v), 3) for v in values] for name, values in columns.items()}


def means(columns: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    def short(value: float | None) -> float | None:
        """Six digits, which keep a result of thousands of rows small."""
        return None if value is None else float(f"{value:.6g}")

    return {
        "mean": {name: short(statistics.fmean(values)) for name, values in columns.items()},
        "half_width": {name: short(half_width(values)) for name, values in columns.items()},
    }


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95% interval over seeds; None if it is not known."""
    if len(values) < 2 or not all(map(isfinite, values)):
        return None
    degrees, z = len(values) - 1, _NORMAL
    if degrees <= len(_T):
        quantile = _T[degrees - 1]
    else:  # Cornish and Fisher's expansion, to 0.2%
        first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
        quantile = z + first / degrees + second / degrees**2
    return quantile * statistics.stdev(values) / sqrt(len(values))


def policy_rows(result: dict[str, Any]) -> list[tuple[str, str, int, int, float, float]]:
    """Policy, group of settings, cells, cells attained, and of these the means of replicas over the
    average need of lossless decoding and of points lost. NaN where none is attained."""
    wanted = {name: slo["attainment"] for name, slo in result["job"]["slos"].items()}
    counted: dict[tuple[str, str], list[tuple[bool, float, float]]] = defaultdict(list)
    for cell in result["cells"]:
        for policy, groups in cell["policies"].items():
            for group, row in groups.items():
                mean = row["mean"]
                attained = mean["attainment"] >= wanted[cell["regime"]]
                over = mean["mean_replicas"] / cell["lossless"]
                counted[policy, group].append((attained, over, mean["points_lost"]))
    found = []
    for (policy, group), rows in counted.items():
        attained = [row for row in rows if row[0]]
        over, points = (
            statistics.fmean(row[column] for row in attained) if attained else float("nan")
            for column in (1, 2)
        )
        found.append((policy, group, len(rows), len(attained), over, points))
    return found


def policy_table(result: dict[str, Any]) -> Printed:
    """How each policy fares over all cells, for a terminal."""
    cells = len(result["cells"])
    table = Printed(title=f"{result['job']['name']}: {cells} cells", title_justify="left")
    for name in ("policy", "settings"):
        table.add_column(name)
    for name in ("attained", "replicas over the mean need", "points lost"):
        table.add_column(name, justify="right")
    for policy, group, _, attained, over, points in policy_rows(result):
        table.add_row(policy, group, f"{attained}/{cells}", *_numbers(attained, over, points))
    return table


def write_report(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).write_text(json.dumps(result) + "\n")
    (folder / "report.html").write_text(report(result), "utf-8")


def report(result: dict[str, Any]) -> str:
    job, facts = result["job"], result["provenance"]
    policies = [
        (policy, f"{attained} of {cells}", *_numbers(attained, over, points))
        for policy, _, cells, attained, over, points in policy_rows(result)
    ]
    heads = ("policy", "cells attained", "replicas over the mean need", "points lost")
    parts: list[Part] = [
        ("text", _head(result)),
        ("table", Table([heads], policies)),
        ("facts", "Replicas over what lossless decoding needs on average, in attained cells."),
        ("heading", "Cell by cell"),
        ("table", _cells(result)),
        ("facts", "Mean replicas (share in time); * misses the objective."),
    ]
    for trace, part in result["timelines"].items():
        where = f"{trace}, {part['regime']}, cold start {part['cold_start_s']:g} s"
        parts += [("heading", where), ("svg", timelines(part["lines"]))]
    parts.append(("facts", f"mars-ray {facts['mars_ray']}, commit {facts['commit']}."))
    parts.append(("details", ("The job", json.dumps(job, indent=1))))
    return page(job["name"], parts)


def timelines(lines: dict[str, dict[str, list[float]]]) -> str:
    """Load, replicas and threshold over time, for the first seed, as SVG."""
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    load, replicas, threshold = figure.subplots(3, 1, sharex=True, height_ratios=(1, 2.4, 0.8))
    first = next(iter(lines.values()))
    # Who takes longer to answer has the longer line.
    last_min = max(line["at_s"][-1] for line in lines.values()) / 60
    load.fill_between(
        [at / 60 for at in first["at_s"]], first["arrivals_per_s"], color=GREY, alpha=0.4, lw=0
    )
    load.set_ylabel("requests/s")
    for (name, line), colour in zip(lines.items(), _COLOURS, strict=False):
        at = [second / 60 for second in line["at_s"]]
        style: dict[str, Any] = {"color": colour, "lw": 1.4, "label": name}
        replicas.plot(at, line["ready"], drawstyle="steps-post", **style)
        if min(line["threshold"]) < 1:
            threshold.plot(at, line["threshold"], drawstyle="steps-post", **style)
    replicas.set_ylabel("replicas ready")
    replicas.set_ylim(0, 1.25 * replicas.get_ylim()[1])
    replicas.legend(frameon=False, ncols=4, loc="upper left", fontsize=9)
    threshold.set_ylabel("threshold")
    threshold.set_ylim(0, 1.08)
    threshold.set_xlabel("minutes")
    for axes in (load, replicas, threshold):
        axes.set_xlim(0, last_min)
        plain(axes)
    return svg(figure)


def _name(cell: Cell, policy: PolicyName, seed: int) -> str:
    return f"{cell}, {policy}, seed {seed}"


def _run(
    job: SimulateJob, model: ServiceModel, cell: Cell, policy: PolicyName, seed: int
) -> dict[str, Any]:
    """Figures of a run; with the first seed, also its timeline."""
    case = make_case(job, model, cell, seed)
    outcome = run(case, policy)
    figures = figures_of(outcome, case)
    if seed == job.seeds_of(cell.trace)[0]:
        figures["timeline"] = thinned(outcome.timeline)
    return figures


def _row(job: SimulateJob, cell: Cell, case: Case, made: Mapping[str, Any]) -> dict[str, Any]:
    policies = {}
    for policy in job.policies:
        runs = [made[_name(cell, policy, seed)] for seed in job.seeds_of(cell.trace)]
        columns = {name: [one[name] for one in runs] for name in FIGURES}
        policies[policy] = {"default": {"seeds": len(runs)} | means(columns)}
    return asdict(cell) | {
        "requests": len(case.trace),
        "duration_s": case.trace.duration_s,
        "lossless": case.need(case.model.levels[0]),
        "step_rows": case.model.step_rows,
        "policies": policies,
    }


def _timelines(job: SimulateJob, cells: list[Cell], made: Mapping[str, Any]) -> dict[str, Any]:
    """One cell of each trace over time: the first regime at the last cold start."""
    shown = (next(iter(job.slos)), job.colds_s[-1])
    return {
        cell.trace: {
            "regime": cell.regime,
            "cold_start_s": cell.cold_start_s,
            "lines": {
                policy: made[_name(cell, policy, job.seeds_of(cell.trace)[0])]["timeline"]
                for policy in job.policies
            },
        }
        for cell in cells
        if (cell.regime, cell.cold_start_s) == shown
    }


def _numbers(attained: int, over: float, points: float) -> tuple[str, str]:
    return (f"{over:.2f}", f"{points:.2f}") if attained else ("-", "-")


def _head(result: dict[str, Any]) -> str:
    job = result["job"]
    regimes = "; ".join(
        f"{name}: first token in {slo['ttft_s']:g} s, {1e3 * slo['time_per_token_s']:g} ms a "
        f"token, {100 * slo['attainment']:g}% of requests"
        for name, slo in job["slos"].items()
    )
    return (
        "Scaling policies on a virtual clock, in cells of a trace, a regime and a cold start, with "
        f"what each ships with. Service model: {result['model']['name']}. Regimes: {regimes}. "
        f"Means over {len(job['seeds'])} seeds. All fleets begin warm and have at most "
        f"{job['scaling']['max_replicas']} replicas; `fixed` has twice the mean need."
    )


def _cells(result: dict[str, Any]) -> Table:
    wanted = {name: slo["attainment"] for name, slo in result["job"]["slos"].items()}
    policies = result["job"]["policies"]
    rows = []
    for cell in result["cells"]:
        where = cell["trace"], cell["regime"], f"{cell['cold_start_s']:g}"
        row = [*where, f"{cell['lossless']:.2f}"]
        for policy in policies:
            mean = cell["policies"][policy]["default"]["mean"]
            mark = "" if mean["attainment"] >= wanted[cell["regime"]] else " *"
            row.append(f"{mean['mean_replicas']:.2f} ({mean['attainment']:.1%}{mark})")
        rows.append(row)
    return Table([["trace", "regime", "cold start, s", "mean need", *policies]], rows)
