"""Measures what each part of the scaling policy brings, by leaving it out.

    python benchmarks/policy_ablation.py TABLE.json OUTPUT.json [TRACE ...]

TABLE.json is the result of `compare_policies.py policies/simulate.toml`: its job, its cells and,
for each cell, the smallest fixed fleet known in hindsight. Our policy runs in every cell (or in
those of the named traces) with the first seed, as it is and without one part at a time. Finished
runs are kept in OUTPUT.parts.
"""

import json
import statistics
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from policies.contenders import OURS, Knob
from policies.job import ComparisonJob
from policies.runs import Run, figures
from rich.console import Console

from mars_ray.autoscale import policy, threshold
from mars_ray.autoscale.service_model import ServiceModel, load_service_model
from mars_ray.files import Kept, write_whole
from mars_ray.provenance import provenance
from mars_ray.simulator.cases import Cell
from mars_ray.simulator.parts import run_parts


def _nothing(*_: object) -> float:
    return 0.0


# What a part's absence is: other values of a module's names.
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "all parts": (policy, {"_UNSEEN": policy._UNSEEN}),
    "no room for what nobody has seen": (policy, {"_UNSEEN": 0.0}),
    "no record of the last hour": (policy, {"quantile": _nothing}),
    "no record of the same hour": (policy, {"_season": _nothing}),
    "utilisation not learnt": (policy, {"_LESS": 0.0, "_MORE": 0.0, "_MUCH_MORE": 0.0}),
    "tried at one speed": (policy, {"_MUCH_MORE": 0.0}),
    "empty replicas teach": (policy, {"_TRIED": 0.0}),
    "no error budget": (policy, {"_HALF": 1e9}),
    "overloads lower the utilisation": (policy, {"_ABOVE": 1e9}),
    "no backlog": (policy, {"backlog": _nothing}),
    "seconds count with their noise": (threshold, {"_NOISE": 0.0}),
    "no seconds, windows alone": (threshold, {"_NOISE": 1e9}),
    "every lower threshold is used": (threshold, {"_LEAST_GAIN": -1.0}),
}


def run_variant(
    variant: str, cell: Cell, replicas: int, job: ComparisonJob, model: ServiceModel
) -> dict[str, Any]:
    """Figures of our policy without a part, in a cell."""
    # A ladder that is kept may be that of another variant.
    threshold._ladder.cache_clear()
    module, changes = VARIANTS[variant]
    seed = job.seeds_of(cell.trace)[0]
    with patch.multiple(module, **changes):
        return figures(Run(cell, OURS, Knob(None, replicas), seed), job, model)


def ablation(
    table: dict[str, Any], traces: list[str], kept: Kept, console: Console
) -> dict[str, Any]:
    """Attained cells and replicas over the best fixed fleet, by variant."""
    job = ComparisonJob.model_validate(table["job"])
    model = load_service_model(job.service_model)
    rows = [row for row in table["cells"] if not traces or row["trace"] in traces]
    cells = {Cell(row["trace"], row["regime"], row["cold_start_s"]): row for row in rows}
    least = job.scaling.min_replicas
    parts = {
        f"{variant}: {cell}": partial(run_variant, variant, cell, least, job, model)
        for cell in cells
        for variant in VARIANTS
    }
    made = run_parts(parts, kept, None, console)
    return {
        variant: _summed({cell: made[f"{variant}: {cell}"] for cell in cells}, cells, job)
        for variant in VARIANTS
    }


def _summed(
    made: Mapping[Cell, dict[str, Any]], cells: Mapping[Cell, dict[str, Any]], job: ComparisonJob
) -> dict[str, Any]:
    attained = [run["attainment"] >= job.slos[c.regime].attainment for c, run in made.items()]
    ratios = []
    for cell, run in made.items():
        fixed = [
            policies["hindsight"]["mean"]["mean_replicas"]
            for name, policies in cells[cell]["policies"].items()
            if name.startswith("fixed") and "hindsight" in policies
        ]
        if fixed:
            ratios.append(run["mean_replicas"] / min(fixed))
    return {
        "cells": len(made),
        "attained": sum(attained),
        "in_time": statistics.fmean(run["attainment"] for run in made.values()),
        "over_best_fixed": statistics.fmean(ratios) if ratios else None,
        "points_lost": statistics.fmean(run["points_lost"] for run in made.values()),
    }


def main() -> None:
    """Run all variants and write their figures."""
    table, output, traces = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    where = provenance()
    kept = Kept(output.with_suffix(".parts"), f"{where['commit']}: {table}")
    result = json.loads(table.read_text())
    variants = ablation(result, traces, kept, Console(stderr=True))
    found = {"variants": variants, "traces": traces or None, "provenance": where}
    write_whole(output, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
