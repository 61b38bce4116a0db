"""Fleets for a trace at one objective: by the hour, of one size, and as our policy scales them.

Each is found by simulation (docs/simulator.md), in each way of decoding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from mars_ray.autoscale.service_model import Level, ServiceModel, step_rows
from mars_ray.config.scaling import ScalingConfig, Slo, ThresholdBounds
from mars_ray.simulator.cases import Case
from mars_ray.simulator.config import Cluster
from mars_ray.simulator.engine.result import summarise
from mars_ray.simulator.engine.run import EXACT, Deciding, simulate
from mars_ray.simulator.policies import Fixed
from mars_ray.simulator.traces.trace import Trace

HOUR_S = 3600.0
# A fixed fleet's decisions do not change, so it needs few ticks; our policy's are a second apart,
# and more over a long trace, but not more than its metrics may be old.
_FIXED_TICK_S, _TICK_S, _LONG_TICK_S, _TICKS = 60.0, 1.0, 5.0, 3600
# Points of a timeline on the page.
_POINTS = 300


@dataclass(frozen=True, slots=True)
class Way:
    """A way of decoding: `levels` are those that our policy may use, and the last one is that of a
    fixed fleet."""

    name: str
    levels: tuple[Level, ...]

    @property
    def level(self) -> Level:
        """The level at which a fixed fleet decodes."""
        return self.levels[-1]

    @property
    def lossless(self) -> bool:
        """Whether answers are those of the model."""
        return not self.level.points_lost


@dataclass(frozen=True, slots=True)
class Scaled:
    """What our policy did over the whole trace."""

    mean_replicas: float
    peak_replicas: int
    replica_hours: float
    attainment: float
    points_lost: float
    below_set_point_s: float
    at_s: list[float]
    ready: list[float]  # replicas, means over equal spans


@dataclass(frozen=True, slots=True)
class Fleets:
    """Fleets in one way of decoding. None: no fleet up to the largest one is enough."""

    capacity_rps: float  # of a replica, by the model
    by_hour: list[int | None]
    fixed: int | None  # the smallest that stays
    fixed_attainment: float | None
    hours: float
    points_lost: float  # by all answers of a fixed fleet
    scaled: Scaled | None

    @property
    def replica_hours(self) -> float | None:
        """Of the fleet by hour; the last hour counts as far as it goes."""
        sizes = [n for n in self.by_hour if n is not None]
        if len(sizes) < len(self.by_hour):
            return None
        return sum(n * min(1.0, self.hours - hour) for hour, n in enumerate(sizes))

    @property
    def fixed_hours(self) -> float | None:
        """Replica-hours of the fleet that stays."""
        return None if self.fixed is None else self.fixed * self.hours


def ways(model: ServiceModel, threshold: float | None) -> list[Way]:
    """Plain decoding, the model's lossless level if it has masks, and a threshold below.

    That is the lowest level at or above the named threshold; without one, above the default floor,
    or the highest below 1 if there is none.
    """
    found = [Way("plain", EXACT)]
    if len(model.levels[0].all_shapes) > 1:
        found.append(Way(model.mode, model.levels[:1]))
    floor = ThresholdBounds().floor if threshold is None else threshold
    below = [n for n, level in enumerate(model.levels) if n and level.threshold >= floor]
    if threshold is None and not below and len(model.levels) > 1:
        below = [1]
    if below:
        last = below[-1]
        name = f"{model.mode} at {model.levels[last].threshold:g}"
        found.append(Way(name, model.levels[: last + 1]))
    return found


def case(trace: Trace, model: ServiceModel, slo: Slo, cold_start_s: float, most: int) -> Case:
    """The case of an objective, with the step size that suits it."""
    rows = step_rows(model, slo.time_per_token_s)
    return Case(
        config=ScalingConfig(slo=slo, max_replicas=most, cold_start_s=max(1e-3, cold_start_s)),
        model=replace(model, step_rows=rows),
        cluster=Cluster(cold_start_s=cold_start_s, step_tokens=rows),
        trace=trace,
        accuracy=100.0,
        seed=0,
    )


def capacity(given: Case, way: Way) -> float:
    """Requests per second that a replica carries, by the model; 0 if even a lone sequence takes
    longer than its time per token."""
    slo_s, mix = given.slo.time_per_token_s, given.mix()
    if not given.model.largest_batch(way.level, mix, slo_s):
        return 0.0
    return given.model.capacity(way.level, mix, slo_s).requests_per_s


def fleets(given: Case, way: Way) -> Fleets:
    """The fleets of a case in one way of decoding."""
    trace, carried = given.trace, capacity(given, way)
    by_hour = [_of_hour(given, way, part, carried) for part in _hours(trace)]
    largest = max((n for n in by_hour if n), default=1)
    fixed = _smallest_fleet(given, way, trace, largest) if carried else None
    return Fleets(
        capacity_rps=carried,
        by_hour=by_hour,
        fixed=fixed,
        fixed_attainment=_attained(given, way, trace, fixed) if fixed else None,
        hours=max(trace.duration_s, 1.0) / HOUR_S,
        points_lost=way.level.points_lost,
        scaled=_scaled(given, way) if carried else None,
    )


def smallest(enough: Callable[[int], bool], guess: int, most: int) -> int | None:
    """The smallest number of replicas from 1 to `most` that is enough, if more are no worse; None
    if not even `most` are. The search begins at the guess."""
    low, high = 0, most + 1  # too few, enough
    size, step = min(max(guess, 1), most), 1
    while high - low > 1:
        if enough(size):
            high = size
        else:
            low = size
        # By steps that double until there is a size on either side, then by halves.
        if low == 0:
            size = max(1, high - step)
        elif high > most:
            size = min(most, low + step)
        else:
            size = (low + high) // 2
        step *= 2
    return high if high <= most else None


def _hours(trace: Trace) -> list[Trace | None]:
    """The trace by hours; None for an hour without a request."""
    hour = (trace.arrival_s // HOUR_S).astype(int)
    there = set(hour.tolist())
    return [
        trace.part(n * HOUR_S, HOUR_S) if n in there else None for n in range(int(hour[-1]) + 1)
    ]


def _of_hour(given: Case, way: Way, part: Trace | None, carried: float) -> int | None:
    """The smallest fleet for an hour by itself."""
    if part is None:
        return 1
    # No fleet helps where a lone sequence is too slow already.
    if not carried:
        return None
    return _smallest_fleet(given, way, part, math.ceil(len(part) / HOUR_S / carried))


def _smallest_fleet(given: Case, way: Way, part: Trace, guess: int) -> int | None:
    wanted = given.slo.attainment
    return smallest(
        lambda n: _attained(given, way, part, n) >= wanted, guess, given.config.max_replicas
    )


def _attained(given: Case, way: Way, part: Trace, replicas: int) -> float:
    """The share of requests that a fixed fleet answers in time."""
    here = replace(_ticking(given, _FIXED_TICK_S), trace=part)
    threshold = way.level.threshold
    fixture = here.fixture((way.level,), threshold, replicas)
    return float(simulate(fixture, Fixed(replicas, threshold)).within(given.slo).mean())


def _scaled(given: Case, way: Way) -> Scaled:
    """Our policy's run; it may lower the threshold to the way's level."""
    bounds = ThresholdBounds(set_point=1.0, floor=way.level.threshold)
    config = given.config.model_copy(update={"threshold": bounds})
    tick_s = min(_LONG_TICK_S, max(_TICK_S, given.trace.duration_s // _TICKS))
    begin = given.begins_with(way.levels[0], config.min_replicas)
    fixture = _ticking(given, tick_s).fixture(way.levels, 1.0, begin)
    outcome = simulate(fixture, Deciding(config, replace(given.model, levels=way.levels)))
    figures = summarise(outcome, given.slo, given.accuracy)
    line = outcome.timeline
    spans = np.array_split(np.arange(len(line.at_s)), min(_POINTS, len(line.at_s)))
    return Scaled(
        mean_replicas=figures["mean_replicas"],
        peak_replicas=figures["peak_replicas"],
        replica_hours=figures["replica_s"] / HOUR_S,
        attainment=figures["attainment"],
        points_lost=figures["points_lost"],
        below_set_point_s=figures["below_set_point_s"],
        at_s=[float(line.at_s[i[0]]) for i in spans],
        ready=[float(line.ready[i].mean()) for i in spans],
    )


def _ticking(given: Case, tick_s: float) -> Case:
    """The case with policies that look so often."""
    return replace(given, cluster=given.cluster.model_copy(update={"tick_s": tick_s}))
