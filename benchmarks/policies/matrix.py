"""The runs of a comparison: which ones it needs, and what those that are made have given."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mars_ray.autoscale.service_model import ServiceModel
from mars_ray.simulator.cases import Cell
from policies.choice import Trial, best_elsewhere
from policies.contenders import (
    FIXED,
    KNOWING,
    Knob,
    Needs,
    Setting,
    grid,
    knob_of,
    mean_need,
    shipped,
)
from policies.job import ComparisonJob, PolicyName
from policies.runs import Run, figures

# A tick takes about as long as so many requests.
_TICK_REQUESTS = 20

# Computes calls by name, or finds what they gave before.
Parts = Callable[[Mapping[str, Callable[[], Any]]], dict[str, Any]]


@dataclass(slots=True)
class Matrix:
    """Runs by cell, policy, setting and seed. Settings that are the same on a trace are one run."""

    job: ComparisonJob
    model: ServiceModel
    needs: dict[tuple[str, str], Needs]  # by trace and regime
    parts: Parts
    cells: list[Cell] = field(init=False)
    made: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        job = self.job
        cells = [Cell(t, r, cold) for t in job.traces for r in job.slos for cold in job.colds_s]
        # Quick ones first; those of a trace together, because it is loaded once.
        self.cells = sorted(cells, key=lambda cell: (self._size(cell.trace), cell.trace))

    def seeds(self, trace: str, policy: PolicyName, setting: Setting) -> tuple[int, ...]:
        """The seeds that judge a setting. Knowing the trace takes a dozen runs, so it has one."""
        seeds = self.job.seeds_of(trace)
        if policy == KNOWING:
            return seeds[:1]
        return seeds if setting in shipped(policy).values() else seeds[: self.job.tuned_seeds]

    def first(self) -> Iterator[Run]:
        """What every policy ships with in every cell, and where it is tuned every setting, with the
        first seed."""
        for cell in self.cells:
            seed = self.job.seeds_of(cell.trace)[0]
            tuning = self.job.tune and cell.cold_start_s == self.job.colds_s[-1]
            for policy in self.job.policies:
                settings = [*shipped(policy).values(), *(grid(policy) if tuning else ())]
                for setting in settings:
                    yield self.run(cell, policy, setting, seed)

    def others(self) -> Iterator[Run]:
        """The settings of all groups with all their seeds. The first seed's must be made."""
        for cell in self.cells:
            for policy in self.job.policies:
                for setting in self.settings(cell, policy).values():
                    yield from self._all_seeds(cell, policy, setting)

    def make(self, runs: Iterable[Run]) -> None:
        """Make the runs that are not made yet, trace by trace."""
        order = list(dict.fromkeys(cell.trace for cell in self.cells))
        runs = sorted(runs, key=lambda run: (order.index(run.cell.trace), run.seed))
        named = {str(run): run for run in runs}
        calls = {
            name: partial(figures, run, self.job, self.model)
            for name, run in named.items()
            if name not in self.made
        }
        self.made |= self.parts(calls)

    def settings(self, cell: Cell, policy: PolicyName) -> dict[str, Setting]:
        """A policy's settings by group; tuned is what did best on the other traces in the same
        regime, at the job's last cold start."""
        found = shipped(policy)
        if not (self.job.tune and len(grid(policy)) > 1):
            return found
        trials = {
            trace: {s: self._trial(other, policy, s) for s in grid(policy)}
            for trace in self.job.traces
            for other in [Cell(trace, cell.regime, self.job.colds_s[-1])]
        }
        tuned = best_elsewhere(trials, cell.trace)
        return found | ({"tuned": tuned} if tuned else {})

    def of(self, cell: Cell, policy: PolicyName, setting: Setting) -> list[dict[str, Any]]:
        """The figures of a setting, by seed."""
        return [self.made[str(run)] for run in self._all_seeds(cell, policy, setting)]

    def knob(self, cell: Cell, policy: PolicyName, setting: Setting) -> Knob:
        """A setting in a cell."""
        scaling, needs = self.job.scaling, self.needs[cell.trace, cell.regime]
        return knob_of(policy, setting, needs, scaling.min_replicas, scaling.max_replicas)

    def run(self, cell: Cell, policy: PolicyName, setting: Setting, seed: int) -> Run:
        """A run in this cell."""
        where = self.same(cell) if policy in FIXED else cell
        return Run(where, policy, self.knob(cell, policy, setting), seed)

    def same(self, cell: Cell) -> Cell:
        """The cell in which a fixed fleet fares the same: unless replicas die, none starts."""
        if self.job.cluster_of(cell.trace, cell.cold_start_s).kills:
            return cell
        return Cell(cell.trace, cell.regime, self.job.colds_s[0])

    def _all_seeds(self, cell: Cell, policy: PolicyName, setting: Setting) -> Iterator[Run]:
        for seed in self.seeds(cell.trace, policy, setting):
            yield self.run(cell, policy, setting, seed)

    def _trial(self, cell: Cell, policy: PolicyName, setting: Setting) -> Trial:
        made = self.made[str(self.run(cell, policy, setting, self.job.seeds_of(cell.trace)[0]))]
        need = mean_need(policy, self.needs[cell.trace, cell.regime])
        wanted = self.job.slos[cell.regime].attainment
        return Trial(made["attainment"] >= wanted, made["mean_replicas"] / need)

    def _size(self, trace: str) -> float:
        needs = self.needs[trace, next(iter(self.job.slos))]
        tick_s = self.job.cluster_of(trace, 0).tick_s
        return needs.requests + _TICK_REQUESTS * needs.duration_s / tick_s
