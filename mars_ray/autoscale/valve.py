"""The fast loop: the threshold as the valve of an overload.

With R running replicas, K and m a replica's requests/s and sequences at a rung, and L requests in
the system, R m are being decoded. A rung is enough if what is above that is gone within the time T
to a first token:

    lambda + (L - R m) / T <= R K

The highest rung that is enough is taken. A lower one is taken at once, a higher one when it would
have carried lambda with a margin for 15 s, empty places not counted. Lossless windows shrink before
any threshold falls: that is the engine's own control. The only integral is that of the points
spent, so nothing winds up while the threshold is at its floor.

Each replica runs the same law over its own queue (`LocalLoop`), because the policy sees the fleet
half a second late and takes the load to be spread evenly. A replica chooses among the thresholds
that the policy allows at the moment, never above the policy's, also when no policy is heard.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mars_ray.autoscale.demand import Demand, observe
from mars_ray.autoscale.operating_points import Rung
from mars_ray.config.scaling import ScalingConfig

# A higher rung must carry this much more than the load, or it would be left again soon.
_MARGIN = 1.05
# Seconds between two lower thresholds, and before a higher one.
LOWER_DWELL_S, RAISE_DWELL_S = 1.0, 15.0
# The mean of the points lost is over an hour.
_BUDGET_S = 3600.0
# The rate of the last seconds reaches back this many times the time to the first token.
_FAST_SPANS = 2.0
# A spent budget has to come down to this share before any of it is spent again.
_RECOVERED = 0.8
# The rate let in, as a multiple of the rate that would leave no queue (`shed_share`).
_WAITING = 2.0
# Some requests are always let in, because without any there is nothing to measure.
_MOST_SHED = 0.95


@dataclass(frozen=True, slots=True)
class Pressure:
    """The load that the present replicas have to carry now."""

    rate: float  # requests per second
    in_system: float  # requests decoding or waiting
    running: int  # replicas
    deadline_s: float

    def enough(self, rung: Rung) -> bool:
        """Whether this rung carries the load within the deadline."""
        return self.rate <= self.admissible(rung)

    def lasting(self, rung: Rung) -> bool:
        """Whether this rung would still carry the load when all places are taken."""
        carried = self.running * rung.requests_per_s
        return _MARGIN * self.rate <= min(carried, self.admissible(rung))

    def admissible(self, rung: Rung) -> float:
        """Arrivals per second that this rung carries besides the requests in the system."""
        room = self.running * rung.sequences - self.in_system
        return self.running * rung.requests_per_s + room / self.deadline_s


@dataclass(frozen=True, slots=True)
class Quality:
    """Memory of the threshold and of the points spent."""

    threshold: float | None = None  # None: never set
    since_lower_s: float = 1e9
    better_s: float = 0.0  # how long a higher rung would have been enough
    better_threshold: float = 0.0  # the lowest of these
    spent_points: float = 0.0  # mean over the budget window
    exhausted: bool = False  # the budget is spent
    shed: float = 0.0


def spend(
    quality: Quality, points: float, traffic: float, dt: float, config: ScalingConfig
) -> Quality:
    """The points spent after `dt` seconds with `points` lost; `traffic` is the rate over the usual
    one."""
    share = 1 - math.exp(-dt / _BUDGET_S)
    spent = quality.spent_points + share * (points * traffic - quality.spent_points)
    budget = config.quality_budget_points
    if budget is None:
        return replace(quality, spent_points=spent, exhausted=False)
    limit = _RECOVERED * budget if quality.exhausted else budget
    return replace(quality, spent_points=spent, exhausted=spent >= limit)


def fast_span_s(config: ScalingConfig) -> float:
    """How far back the rate of the last seconds reaches."""
    return _FAST_SPANS * config.slo.ttft_s


def steer(quality: Quality, rungs: Sequence[Rung], pressure: Pressure, dt: float) -> Quality:
    """The threshold from now on, and for how long a higher one would have been enough."""
    quality = replace(quality, since_lower_s=quality.since_lower_s + dt)
    now = current(rungs, quality.threshold)
    if pressure.running == 0:
        return replace(quality, threshold=now.threshold, better_s=0.0)
    wanted = next((rung for rung in rungs if pressure.enough(rung)), rungs[-1])
    if wanted.threshold < now.threshold:
        return _lower(quality, now, wanted)
    safe = next((rung for rung in rungs if pressure.lasting(rung)), rungs[-1])
    if safe.threshold <= now.threshold:
        return replace(quality, threshold=now.threshold, better_s=0.0)
    better = safe.threshold
    if quality.better_s > 0:
        better = min(better, quality.better_threshold)
    if quality.better_s + dt >= RAISE_DWELL_S:
        return replace(quality, threshold=better, better_s=0.0)
    return replace(
        quality, threshold=now.threshold, better_s=quality.better_s + dt, better_threshold=better
    )


def _lower(quality: Quality, now: Rung, wanted: Rung) -> Quality:
    if quality.since_lower_s < LOWER_DWELL_S:
        return replace(quality, threshold=now.threshold, better_s=0.0)
    return replace(quality, threshold=wanted.threshold, better_s=0.0, since_lower_s=0.0)


def current(rungs: Sequence[Rung], threshold: float | None) -> Rung:
    """The rung in force: the lowest not below `threshold`, since rungs change with the traffic."""
    if threshold is None:
        return rungs[0]
    return next((rung for rung in reversed(rungs) if rung.threshold >= threshold), rungs[0])


def shed_share(rung: Rung, pressure: Pressure, unpinned: float) -> float:
    """Share of the new unpinned requests for which the queue at the floor would be too long.

    Twice the admissible rate is let in; the queue then settles where requests wait for half of the
    deadline.
    """
    admissible = _WAITING * max(0.0, pressure.admissible(rung))
    if pressure.rate <= admissible or unpinned <= 0 or pressure.running == 0:
        return 0.0
    return min(_MOST_SHED, (1 - admissible / pressure.rate) / unpinned)


@dataclass(slots=True)
class LocalLoop:
    """The fast loop of one replica. Without rungs the policy's threshold is in force."""

    config: ScalingConfig
    threshold: float  # the policy's
    rungs: Sequence[Rung] = ()  # those that the policy allows, the highest first
    _demand: Demand = field(default_factory=Demand)
    _quality: Quality = field(default_factory=Quality)
    _tick_s: float | None = None
    _arrived: float = 0.0

    def tick(self, in_system: float, arrived: float, now: float) -> float:
        """The threshold in force from now on.

        `in_system` requests decode or wait here; `arrived` counts those since the start. `now` is a
        clock in seconds that never goes back.
        """
        dt = now - self._tick_s if self._tick_s is not None else 0.0
        rate = (arrived - self._arrived) / dt if dt > 0 else 0.0
        self._tick_s, self._arrived = now, arrived
        if dt > 0:
            self._demand = observe(self._demand, rate, dt, fast_span_s(self.config), 1.0)
        if not self.rungs:
            return self.threshold
        pressure = Pressure(self._demand.fast_per_s, in_system, 1, max(self.config.slo.ttft_s, dt))
        self._quality = steer(self._quality, self.rungs, pressure, dt)
        own = self._quality.threshold
        return self.threshold if own is None else min(self.threshold, own)
