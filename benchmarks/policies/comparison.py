"""All policies in all cells with all seeds, as shipped and tuned on other traces.

One matrix of runs has what every policy ships with in every cell, and at the last cold start all
its settings, with the first seed. From it each policy gets, for each trace and regime, the setting
that did best on the other traces; then these settings, and those that policies ship with, are run
in all cells with their other seeds. No run is made twice.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from mars_ray.autoscale.service_model import ServiceModel, load_service_model
from mars_ray.files import ResultCache
from mars_ray.provenance import provenance
from mars_ray.simulator.cases import Cell, make_case, run_parts
from mars_ray.simulator.report import KEPT_FILE, warn_of_steps, work_of
from policies.contenders import (
    FIXED,
    OURS,
    UNLOWERED,
    Knob,
    Needs,
    Setting,
    grid,
    needs_of,
    shipped,
)
from policies.job import ComparisonJob, PolicyName
from policies.matrix import Matrix
from policies.rows import made_row, valve_row
from policies.runs import Run, bounds, hindsight, timeline
from policies.verdict import claims

_Bounds = dict[Cell, dict[str, float]]
_Hindsights = dict[tuple[Cell, PolicyName], dict[str, Any] | None]
# Policies that are drawn over time, with the groups of their settings.
_DRAWN: tuple[tuple[PolicyName, str], ...] = (
    (OURS, "default"),
    ("ray", "default"),
    ("ray-verified", "tuned"),
    ("fixed-verified", "hindsight"),
)
# What a job may choose without a change in any part: more or fewer of them are needed.
_CHOSEN = {"name", "policies", "cold_starts_s", "tune", "tuned_seeds"}
# About how many runs it takes to find a fleet with hindsight.
_SEARCH = 6


def run_simulations(
    job: ComparisonJob, console: Console, directory: Path | None = None, workers: int | None = None
) -> dict[str, Any]:
    """The comparison as JSON values: cells with their policies, and what follows from them.

    Finished parts are kept in the directory, and not simulated again for the same job and code.
    Workers are processes, by default one per core. Raises ConfigError or DataError.
    """
    model = load_service_model(job.service_model)
    warn_of_steps(job, model, console)
    # Loading all traces now shows at once if one is missing.
    needs = _needs(job, model)
    where = provenance()
    kept = ResultCache(
        directory / KEPT_FILE if directory else None, work_of(job, model, where, _CHOSEN)
    )
    parts = partial(run_parts, kept=kept, workers=workers, console=console)
    matrix = Matrix(job, model, needs, parts)
    _estimate(matrix, workers, console)
    matrix.make(matrix.first())
    matrix.make(matrix.others())
    bound, found = _beside(matrix)
    cells = [_row(matrix, cell, bound, found) for cell in matrix.cells]
    return {
        "job": job.model_dump(mode="json"),
        "model": {"name": model.name, "provenance": model.provenance},
        "cells": cells,
        "claims": claims(cells, job),
        "timelines": _timelines(matrix, cells),
        "cost": _cost(matrix, found),
        "provenance": where,
    }


def _needs(job: ComparisonJob, model: ServiceModel) -> dict[tuple[str, str], Needs]:
    """What each trace needs in each regime."""
    return {
        (trace, regime): needs_of(
            make_case(job, model, Cell(trace, regime, job.colds_s[0]), job.seeds_of(trace)[0])
        )
        for trace in job.traces
        for regime in job.slos
    }


def _estimate(matrix: Matrix, workers: int | None, console: Console) -> None:
    """Say how long it will take, from one run of each trace."""
    job = matrix.job
    policy = job.policies[0]
    ones = {
        cell.trace: matrix.run(
            cell, policy, next(iter(shipped(policy).values())), job.seeds_of(cell.trace)[0]
        )
        for cell in reversed(matrix.cells)
    }
    matrix.make(ones.values())
    counts = Counter(run.cell.trace for run in {str(r): r for r in matrix.first()}.values())
    for cell in matrix.cells:
        seeds = len(job.seeds_of(cell.trace))
        counts[cell.trace] += (seeds - 1) * sum(len(shipped(p)) for p in job.policies)
        if job.tune and len(job.traces) > 1:
            tuned = min(seeds, job.tuned_seeds or seeds)
            tuned -= cell.cold_start_s == job.colds_s[-1]  # one of them has been made
            counts[cell.trace] += tuned * sum(len(grid(p)) > 1 for p in job.policies)
        searches = sum(policy in FIXED for policy in job.policies)
        counts[cell.trace] += searches * (seeds + _SEARCH)
    seconds = sum(matrix.made[str(one)]["cpu_s"] * counts[trace] for trace, one in ones.items())
    seconds /= workers or os.cpu_count() or 1
    console.print(
        f"up to {counts.total():,} runs, about {seconds / 60:.1f} minutes", highlight=False
    )


def _beside(matrix: Matrix) -> tuple[_Bounds, _Hindsights]:
    """What stands beside the policies: the replicas that no schedule can do without, by cell, and
    the smallest fixed fleets that attain, by cell and policy; None where none does."""
    job, model = matrix.job, matrix.model
    bound = {cell: f"bound: {matrix.same(cell)}" for cell in matrix.cells}
    calls: dict[str, Callable[[], Any]] = {
        name: partial(bounds, cell, job, model) for cell, name in bound.items()
    }
    sizes: dict[tuple[Cell, PolicyName], str] = {}
    fixed: list[PolicyName] = [policy for policy in job.policies if policy in FIXED]
    for cell in matrix.cells:
        for policy in fixed:
            name = f"hindsight: {matrix.same(cell)}, {policy}"
            between = _bracket(matrix, cell, policy)
            sizes[cell, policy] = name
            calls[name] = partial(hindsight, matrix.same(cell), policy, between, job, model)
    made = matrix.parts(calls)
    return (
        {cell: made[name] for cell, name in bound.items()},
        {key: made[name] for key, name in sizes.items()},
    )


def _bracket(matrix: Matrix, cell: Cell, policy: PolicyName) -> tuple[int, int]:
    """The largest fleet of the matrix that misses with the first seed, and the next larger one that
    attains; the bounds of all fleets where there is none."""
    seed = matrix.job.seeds_of(cell.trace)[0]
    wanted = matrix.job.slos[cell.regime].attainment
    settings = [*shipped(policy).values(), *(grid(policy) if matrix.job.tune else ())]
    runs = [matrix.run(cell, policy, setting, seed) for setting in settings]
    made = {run.knob.replicas: matrix.made.get(str(run)) for run in runs}
    attained = {size: one["attainment"] >= wanted for size, one in made.items() if one}
    scaling = matrix.job.scaling
    high = min([size for size, ok in attained.items() if ok], default=scaling.max_replicas)
    missed = [size for size, ok in attained.items() if not ok and size < high]
    return max(missed, default=scaling.min_replicas - 1), high


def _row(matrix: Matrix, cell: Cell, bound: _Bounds, found: _Hindsights) -> dict[str, Any]:
    """A cell, with its policies by group."""
    policies: dict[str, dict[str, Any]] = {}
    for policy in matrix.job.policies:
        policies[policy] = {
            group: made_row(
                setting, matrix.knob(cell, policy, setting), matrix.of(cell, policy, setting)
            )
            for group, setting in matrix.settings(cell, policy).items()
        }
        if known := found.get((cell, policy)):
            knob = Knob(None, known["replicas"])
            policies[policy]["hindsight"] = made_row(None, knob, known["runs"])
    row = asdict(cell) | asdict(matrix.needs[cell.trace, cell.regime])
    row |= {"bound": bound[cell], "policies": policies}
    if OURS in policies and UNLOWERED in policies:
        row["valve"] = valve_row(
            matrix.of(cell, OURS, Setting()), matrix.of(cell, UNLOWERED, Setting())
        )
    return row


def _timelines(matrix: Matrix, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """One cell of each trace over time: the first regime at the last cold start."""
    job = matrix.job
    named: dict[str, tuple[str, str]] = {}
    calls = {}
    result: dict[str, Any] = {}
    for row in cells:
        cell = Cell(row["trace"], row["regime"], row["cold_start_s"])
        if (cell.regime, cell.cold_start_s) != (next(iter(job.slos)), job.colds_s[-1]):
            continue
        result[cell.trace] = {"regime": cell.regime, "cold_start_s": cell.cold_start_s, "lines": {}}
        for policy, group in _DRAWN:
            if made := row["policies"].get(policy, {}).get(group):
                knob = Knob(made["target"], made["replicas"])
                run = Run(cell, policy, knob, job.seeds_of(cell.trace)[0])
                named[f"timeline: {run}"] = cell.trace, f"{policy}, {group}"
                calls[f"timeline: {run}"] = partial(timeline, run, job, matrix.model)
    made = matrix.parts(calls)
    for name, (trace, label) in named.items():
        result[trace]["lines"][label] = made[name]
    return result


def _cost(matrix: Matrix, found: _Hindsights) -> dict[str, int]:
    """What all runs took."""
    searched = [run for one in found.values() if one for run in one["runs"]]
    seconds = sum(run["cpu_s"] for run in (*matrix.made.values(), *searched))
    return {"runs": len(matrix.made) + len(searched), "cpu_s": round(seconds)}
