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

How much arrives (`Demand`) is counted in windows of 30 s, in replicas that they need: as many as
their requests per second are times what one replica carries at the set-point with all its sequences
within the time per token. The windows of the last hour are kept, and the rate of the last seconds
for what is younger than a window.

The thresholds worth using, and what a replica carries at each for the present traffic, are the
rungs. Work adds up: with share s_c of the requests at a level that carries K_c of them per second,
a replica carries 1 / sum(s_c / K_c). Pinned requests stay lossless and a quality class stays at its
floor. So the fewer requests may be lowered, the less capacity a lower threshold gains.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, median

from mars_ray.autoscale.sample import PINNED, Traffic
from mars_ray.autoscale.service_model import Mix, ServiceModel
from mars_ray.config.scaling import ScalingConfig

WINDOW_S = 30.0
# Windows that are remembered: those of an hour.
KEPT = 120
# The newest windows' rates, from which the burst index is taken.
_RATES = 20
# A rate of seconds counts without this many standard deviations of its noise.
_NOISE = 2.0
# A burst index above the first is not believed; the second holds before anything is known.
_MOST_BURST, _UNKNOWN_BURST = 25.0, 4.0
# A rung must carry at least this much more than the one before; less is within the model's error.
_LEAST_GAIN = 0.03
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
class Demand:
    """Memory of the arrivals."""

    fast_per_s: float = 0.0  # requests per second over the last seconds
    fast_span_s: float = 0.0  # how long that reaches back, at most
    open_s: float = 0.0  # seconds of the window being filled
    open_requests: float = 0.0
    windows: tuple[float, ...] = ()  # replicas that each full window needed, the newest last
    rates: tuple[float, ...] = ()  # requests per second of the newest of them

    @property
    def newest(self) -> float:
        """Replicas that the last two windows needed."""
        return fmean(self.windows[-2:] or (0.0,))

    @property
    def usual(self) -> float:
        """Replicas that the last five minutes needed."""
        return fmean(self.windows[-10:] or (0.0,))


def observe_arrivals(
    demand: Demand, rate: float, dt: float, span_s: float, capacity: float
) -> Demand:
    """The demand after `dt` more seconds with `rate` requests per second.

    A replica carries `capacity` requests per second; the fast rate reaches `span_s` back.
    """
    span = min(demand.fast_span_s + dt, span_s)
    # An exponential mean, but a plain one until a whole span has been seen.
    weight = 1 - math.exp(-dt / span) if demand.fast_span_s and span else 1.0
    demand = replace(
        demand,
        fast_per_s=demand.fast_per_s + weight * (rate - demand.fast_per_s),
        fast_span_s=span,
        open_s=demand.open_s + dt,
        open_requests=demand.open_requests + rate * dt,
    )
    if demand.open_s < WINDOW_S:
        return demand
    count = min(KEPT, int(demand.open_s / WINDOW_S))
    mean = demand.open_requests / demand.open_s
    return replace(
        demand,
        open_s=0.0,
        open_requests=0.0,
        windows=(*demand.windows, *[mean / capacity] * count)[-KEPT:],
        rates=(*demand.rates, *[mean] * count)[-_RATES:],
    )


def present_demand(demand: Demand, capacity: float) -> float:
    """Replicas needed now: by the last windows, or by the last seconds where these surely need
    more."""
    if not demand.fast_span_s:
        return 0.0
    noise = math.sqrt(burst_index(demand.rates) * demand.fast_per_s / demand.fast_span_s)
    return max(demand.newest, (demand.fast_per_s - _NOISE * noise) / capacity)


def burst_index(rates: Sequence[float]) -> float:
    """Variance over mean of the counts of windows: 1 for Poisson arrivals.

    It comes from the differences of neighbours, so that slow change does not count. Half a squared
    difference has the variance as its mean; its median, which a jump of the load does not move, is
    less by a constant factor (chi-square with one degree of freedom).
    """
    indices = [(b - a) ** 2 * WINDOW_S / (a + b) for a, b in pairwise(rates) if a + b > 0]
    if len(indices) < 4:
        return _UNKNOWN_BURST
    return min(_MOST_BURST, max(1.0, median(indices) / 0.455))


@dataclass(frozen=True, slots=True)
class Rung:
    """A replica's capacity at one threshold, with all its sequences within the time per token."""

    threshold: float
    requests_per_s: float
    sequences: float
    points_lost: float  # mean over all requests


def ladder(model: ServiceModel, config: ScalingConfig, traffic: Traffic) -> tuple[Rung, ...]:
    """The set-point first, then every lower threshold that carries more than the one before."""
    floors = tuple(sorted(config.quality_classes.items()))
    time_s, bounds = config.slo.time_per_token_s, config.threshold
    return _ladder(model, traffic.rounded(), bounds.set_point, bounds.floor, floors, time_s)


# A fleet's traffic changes slowly: a service uses one entry, simulations use the others.
@lru_cache(maxsize=256)
def _ladder(
    model: ServiceModel,
    traffic: Traffic,
    set_point: float,
    floor: float,
    class_floors: tuple[tuple[str, float], ...],
    time_per_token_s: float,
) -> tuple[Rung, ...]:
    lower = [level.threshold for level in model.levels if floor <= level.threshold < set_point]
    rungs: list[Rung] = []
    for threshold in [set_point, *lower]:
        rung = _rung(model, traffic, threshold, dict(class_floors), time_per_token_s)
        if not rungs:
            rungs.append(rung)
            continue
        # Answers in time have to outweigh the additional wrong ones. In an overload a late answer
        # is worth nothing, so a percent more capacity is worth a point.
        gain = rung.requests_per_s / rungs[-1].requests_per_s - 1
        if gain > max(_LEAST_GAIN, (rung.points_lost - rungs[-1].points_lost) / 100):
            rungs.append(rung)
    return tuple(rungs)


def _rung(
    model: ServiceModel,
    traffic: Traffic,
    threshold: float,
    class_floors: Mapping[str, float],
    time_per_token_s: float,
) -> Rung:
    shares, gains = dict(traffic.class_shares), dict(traffic.gains)
    free = max(0.0, 1 - sum(shares.values()))
    parts = [(free, threshold)] + [
        # A request of an undeclared class counts as pinned.
        (share, 1.0 if name == PINNED else max(threshold, class_floors.get(name, 1.0)))
        for name, share in shares.items()
    ]
    mix = Mix(traffic.prompt_tokens, traffic.output_tokens)
    work = occupied = points = total = 0.0
    for share, at in parts:
        level = model.level(at)
        level = level.with_gain(gains.get(level.threshold, 1.0))
        carried = model.capacity(level, mix, time_per_token_s / traffic.slowness)
        work += share / carried.requests_per_s
        occupied += share / carried.requests_per_s * carried.batch
        points += share * level.points_lost
        total += share
    rate = total / work
    return Rung(threshold, rate / traffic.slowness, occupied / work, points / total)


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
        if quality.since_lower_s < LOWER_DWELL_S:
            return replace(quality, threshold=now.threshold, better_s=0.0)
        return replace(quality, threshold=wanted.threshold, better_s=0.0, since_lower_s=0.0)
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


@dataclass(frozen=True, slots=True)
class SetPoint:
    """What is in force for requests that pin nothing, from the decision to the engine."""

    threshold: float
    shed: float = 0.0  # share of new ones to refuse
    rungs: tuple[Rung, ...] = ()  # that a replica may choose from by itself, the highest first


@dataclass(slots=True)
class LocalLoop:
    """The fast loop of one replica. Without rungs the policy's threshold is in force."""

    config: ScalingConfig
    set_point: SetPoint  # the policy's
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
            self._demand = observe_arrivals(self._demand, rate, dt, fast_span_s(self.config), 1.0)
        if not self.set_point.rungs:
            return self.set_point.threshold
        pressure = Pressure(self._demand.fast_per_s, in_system, 1, max(self.config.slo.ttft_s, dt))
        self._quality = steer(self._quality, self.set_point.rungs, pressure, dt)
        own = self._quality.threshold
        decided = self.set_point.threshold
        return decided if own is None else min(decided, own)
