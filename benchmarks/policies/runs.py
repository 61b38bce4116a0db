"""One run of the comparison: its name, and what is kept of it, as JSON values."""

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from mars_ray.autoscale.service_model import ServiceModel
from mars_ray.simulator.cases import Cell, Fixed, make_case
from mars_ray.simulator.config import Cluster
from mars_ray.simulator.engine.run import EXACT, Fixture, simulate
from mars_ray.simulator.report import figures_of, thinned
from mars_ray.simulator.traces.trace import Trace
from policies.clairvoyant import clairvoyant
from policies.contenders import KNOWING, Knob, run
from policies.job import ComparisonJob, PolicyName
from policies.lower_bound import lower_bound


@dataclass(frozen=True, slots=True)
class Run:
    """A policy with a setting in a cell, with one seed."""

    cell: Cell
    policy: PolicyName
    knob: Knob
    seed: int

    def __str__(self) -> str:
        return f"{self.cell}, {self.policy} ({self.knob}), seed {self.seed}"


def figures(one: Run, job: ComparisonJob, model: ServiceModel) -> dict[str, Any]:
    """Figures of a run, and what it took to compute."""
    _compile()
    case = make_case(job, model, one.cell, one.seed)
    began = time.process_time()
    knows = one.policy == KNOWING
    outcome = clairvoyant(case) if knows else run(case, one.policy, one.knob)
    kept = figures_of(outcome, case)
    return kept | {"cpu_s": round(time.process_time() - began, 3)}


def timeline(one: Run, job: ComparisonJob, model: ServiceModel) -> dict[str, list[float]]:
    """The timeline of a run."""
    case = make_case(job, model, one.cell, one.seed)
    return thinned(run(case, one.policy, one.knob).timeline)


def bounds(cell: Cell, job: ComparisonJob, model: ServiceModel) -> dict[str, float]:
    """Replicas, on average until the last arrival, that no schedule can do without: lossless, and
    at any threshold that may be in force. The mean over seeds."""
    cases = [make_case(job, model, cell, seed) for seed in job.seeds_of(cell.trace)]
    floor = job.scaling.threshold.floor
    allowed = tuple(level for level in model.levels if level.threshold >= floor - 1e-9)
    found = {
        name: [lower_bound(case, levels) / case.trace.duration_s for case in cases]
        for name, levels in (("lossless", model.levels[:1]), ("any", allowed))
    }
    return {name: float(np.mean(values)) for name, values in found.items()}


def hindsight(
    cell: Cell,
    policy: PolicyName,
    between: tuple[int, int],
    job: ComparisonJob,
    model: ServiceModel,
) -> dict[str, Any] | None:
    """The smallest fixed fleet above the first size and up to the second one that attains on
    average over the seeds, and its runs; None if none does.

    A larger fleet is hardly ever later, so the first seed's is found by bisection.
    """
    seeds = job.seeds_of(cell.trace)
    slo = job.slos[cell.regime]

    def runs(size: int, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
        ones = [Run(cell, policy, Knob(None, size), seed) for seed in seeds]
        return [figures(one, job, model) for one in ones]

    low, high = between
    while high - low > 1:
        middle = (low + high) // 2
        if runs(middle, seeds[:1])[0]["attainment"] >= slo.attainment:
            high = middle
        else:
            low = middle
    for size in range(high, job.scaling.max_replicas + 1):
        found = runs(size, seeds)
        if np.mean([one["attainment"] for one in found]) >= slo.attainment:
            return {"replicas": size, "runs": found}
    return None


@cache
def _compile() -> None:
    """Have the engine compiled, or loaded, before a run is timed; once a process."""
    model = ServiceModel("none", ((1, 0.01), (2, 0.01)), EXACT, max_batch=1)
    trace = Trace("none", np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
    simulate(Fixture(trace, model, Cluster(), EXACT, 1.0, 1, 1, seed=0), Fixed(1))
