"""A cell of the comparison, and what a run in it needs besides its policy."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from pydantic import TypeAdapter

from mars_ray.autoscale.service_model import Level, Mix, ServiceModel
from mars_ray.autoscale.step_size import step_rows
from mars_ray.config.scaling import ScalingConfig, Slo
from mars_ray.simulator.config import Cluster, SimulateJob, TraceSource
from mars_ray.simulator.engine.run import EXACT, Fixture
from mars_ray.simulator.traces.load import load_trace
from mars_ray.simulator.traces.trace import Trace

# Every fleet begins warm, with so many times what this many seconds of the trace need.
_BEGINNING_S, _SPARE = 120.0, 1.5
# Load varies if within this many seconds the mean of some window is less than half of another's.
_SPAN_S, _WINDOW_S = 3600.0, 300.0
_UNWATCHED_S = 5.0
_ALL = slice(None)
_SOURCE: TypeAdapter[TraceSource] = TypeAdapter(TraceSource)


@dataclass(frozen=True, slots=True)
class Cell:
    """A trace in a regime at a cold start."""

    trace: str
    regime: str
    cold_start_s: float

    def __str__(self) -> str:
        return f"{self.trace}, {self.regime}, cold start {self.cold_start_s:g} s"


@dataclass(frozen=True, slots=True)
class Case:
    """A cell with the trace of one seed."""

    config: ScalingConfig  # of the cell: with its SLO and cold start
    model: ServiceModel
    cluster: Cluster
    trace: Trace
    accuracy: float
    seed: int

    @property
    def slo(self) -> Slo:
        """What is owed to a request."""
        return self.config.slo

    def need(self, level: Level) -> float:
        """Replicas, with fractions, that would carry the trace if it came evenly."""
        return self._need(level, _ALL, max(1.0, self.trace.duration_s))

    def load(self, level: Level) -> float:
        """Requests that a replica holds at its capacity."""
        return self.model.capacity(level, self.mix(), self.slo.time_per_token_s).batch

    def begins_with(self, level: Level, least: int) -> int:
        """Replicas that are warm when the run begins: what the beginning needs, with some spare."""
        here = slice(0, int(self.trace.arrival_s.searchsorted(_BEGINNING_S)))
        need = self._need(level, here, _BEGINNING_S)
        return min(max(math.ceil(_SPARE * need), least), self.config.max_replicas)

    def unwatched(self) -> "Case":
        """The case with fewer ticks: without kills, a fleet that never changes needs none. A run
        ends with a tick, so that they cannot be left out."""
        if self.cluster.kills:
            return self
        tick_s = max(self.cluster.tick_s, _UNWATCHED_S)
        return replace(self, cluster=self.cluster.model_copy(update={"tick_s": tick_s}))

    def varies(self) -> bool:
        """Whether within an hour the load of five minutes is less than half of that of others."""
        trace = self.trace
        work = trace.prompt_tokens / self.model.step_rows + trace.output_tokens
        window = (trace.arrival_s / _WINDOW_S).astype(int)
        # The last window is not whole.
        loads = np.bincount(window, work)[:-1]
        span = int(_SPAN_S / _WINDOW_S)
        parts = [loads[i : i + span] for i in range(max(1, len(loads) - span + 1))]
        return any(len(part) and part.min() < 0.5 * part.max() for part in parts)

    def fixture(self, levels: tuple[Level, ...], set_point: float, replicas: int) -> Fixture:
        """A run's fixture, with so many replicas to begin with."""
        return Fixture(
            trace=self.trace,
            model=self.model,
            cluster=self.cluster,
            levels=levels,
            set_point=set_point,
            replicas=replicas,
            most=max(self.config.max_replicas, replicas),
            seed=self.seed,
            slo=self.slo,
        )

    def mix(self, here: slice = _ALL) -> Mix:
        """The mean request of a part of the trace."""
        trace = self.trace
        return Mix(float(trace.prompt_tokens[here].mean()), float(trace.output_tokens[here].mean()))

    def _need(self, level: Level, here: slice, span_s: float) -> float:
        count = len(self.trace.arrival_s[here])
        if not count:
            return 0.0
        capacity = self.model.capacity(level, self.mix(here), self.slo.time_per_token_s)
        return count / span_s / capacity.requests_per_s


@dataclass(frozen=True, slots=True)
class Needs:
    """What settings of a cell are shares of, by the trace of its first seed."""

    requests: int
    duration_s: float
    plain: float  # replicas that plain decoding needs on average
    lossless: float  # and the model's lossless level
    varies: bool
    step_rows: int


def needs_of(case: Case) -> Needs:
    """The needs of a case."""
    return Needs(
        requests=len(case.trace),
        duration_s=case.trace.duration_s,
        plain=case.need(EXACT[0]),
        lossless=case.need(case.model.levels[0]),
        varies=case.varies(),
        step_rows=case.model.step_rows,
    )


def make_case(job: SimulateJob, model: ServiceModel, cell: Cell, seed: int) -> Case:
    """The case of this seed. Raises DataError if the trace cannot be read."""
    slo = job.slos[cell.regime]
    cluster = job.cluster_of(cell.trace, cell.cold_start_s)
    rows = cluster.step_tokens or step_rows(model, slo.time_per_token_s)
    changes = {"slo": slo, "cold_start_s": max(1e-3, cell.cold_start_s)}
    return Case(
        config=job.scaling.model_copy(update=changes),
        model=replace(model, step_rows=rows),
        cluster=cluster.model_copy(update={"step_tokens": rows}),
        trace=loaded(job.traces[cell.trace], seed),
        accuracy=job.accuracy,
        seed=seed,
    )


def loaded(source: TraceSource, seed: int) -> Trace:
    """The source's trace. Raises DataError."""
    return _loaded(source.model_dump_json(), seed)


@lru_cache(maxsize=6)
def _loaded(source: str, seed: int) -> Trace:
    """Kept, because consecutive runs have the same trace."""
    return load_trace(_SOURCE.validate_json(source), seed)
