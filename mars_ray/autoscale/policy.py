"""The policy: how many replicas, at which threshold, and why (docs/reference/autoscaling.md).

One pure function serves the cluster, the simulator and the tests. Two loops read one sample. The
slow loop orders replicas at the set-point quality. The fast loop (`threshold.py`) lowers the
threshold when the present replicas cannot carry the load, choosing among the thresholds that gain
capacity for this traffic. As the slow loop never sees the fast one's threshold, quality recovers as
replicas arrive (mid-ranging). Missing or old metrics change nothing: the last decision holds and
nothing is published.

The slow loop asks for

    N = max(floor, present + backlog) / utilisation

present      what arrives now (`threshold.py: Demand`)
backlog      what has piled up by then, drained within a second cold start; replicas on their way
             are credited for the time that they will have served
utilisation  share of the modelled capacity at which requests are in time (`Feedback`)
floor        for what is known and not known of this service (`Floor`), the largest of

    quantile  the smallest number of replicas such that of the last hour's demand only a share of
              1 - attainment came in windows that needed more (weighted by demand, since the
              objective counts requests, not windows)
    unseen    what no window has shown yet:
              usual + e^(-age / 20 min) min(2.5 usual, 3.5 sqrt(usual))
    season    the quantile of this hour, a week or else a day ago

The utilisation is learnt, since a replica's modelled capacity is that of a steady batch. How much
of it can be used with requests that come in bursts, of unequal length, unevenly routed, no model
tells. After each window, with the largest demand per replica of the last ones as the load that was
tried:

- more late than the objective allows, at a load that was believed to be carried: less is believed,
  by up to 15%, in proportion to how many were late;
- in time, at half of that load at least: more is believed, faster the fewer requests came near
  their limits. Replicas that are nearly empty teach nothing.

The objective is a share over time. Of the requests of the last hour, those that were late spend an
error budget (Google's Site Reliability Workbook, chapter 2). Above half of it, belief rises slowly.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import fmean

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from mars_ray.autoscale.sample import NO_ROOM, PINNED, Sample, Traffic, observe_traffic
from mars_ray.autoscale.service_model import ServiceModel
from mars_ray.autoscale.threshold import (
    RAISE_DWELL_S,
    WINDOW_S,
    Demand,
    Pressure,
    Quality,
    Rung,
    current,
    fast_span_s,
    ladder,
    observe_arrivals,
    present_demand,
    shed_share,
    spend,
    steer,
)
from mars_ray.config.scaling import ScalingConfig
from mars_ray.errors import DataError

# A second of heavy traffic counts at most this many times as much as a usual one.
_MOST_TRAFFIC = 10.0
_LONGEST_COLD_START_S = 3600.0
# Parts of the scale-down window whose maxima are kept: it slides by one part.
_PARTS = 4
_LEAST_WINDOW_S = 120.0
_COLD_STARTS = 2
# How many times more than usual a service may get that nobody has watched yet, for a large one how
# many times the root of its replicas, and how fast watching it makes that unlikely.
_UNSEEN, _LARGE, _WATCHED_S = 2.5, 3.5, 1200.0
_HOUR_S, _DAY, _WEEK = 3600.0, 24, 168
# An hour's part that must be seen before the hour counts as known.
_SEEN_WINDOWS = 90
# Of the share of the modelled capacity that is believed to be usable: at first, least and most.
_FIRST_BELIEF, _LEAST_BELIEF, _MOST_BELIEF = 0.7, 0.2, 1.0
# The share by which less is believed when all are late or a tenth are; lateness above counts fully.
_LESS, _MANY_LATE = 0.15, 0.1
# The share by which more is believed after a window: always, and if no request came near a limit.
_MORE, _MUCH_MORE = 0.002, 0.012
_NEAR = 0.05  # a share of requests near their limits that leaves no room
# A load above the belief explains lateness; by this factor it does not count as above.
_ABOVE = 1.1
# A load below this share of the belief says nothing of whether more could be carried.
_TRIED = 0.5
_LOADS = 6  # windows over which lateness may come from an earlier load
_BUDGET_S = 3600.0
_HALF = 0.5  # of the error budget


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas needed, with fractions, by cause."""

    floor: float
    present: float
    backlog: float
    utilisation: float

    @property
    def replicas(self) -> int:
        """Number of replicas that meets both causes."""
        wanted = max(self.floor, self.present + self.backlog) / self.utilisation
        # 3.0000001 is 3: rounding of float means must not order a replica.
        return max(0, math.ceil(wanted - 1e-6))


@dataclass(frozen=True, slots=True)
class Fleet:
    """Memory of the replicas: how many were asked for and needed lately, and how long idle."""

    asked: int | None = None  # the last number asked for
    cold_start_s: float | None = None  # measured
    idle_s: float = 0.0  # time without a request
    # Most replicas needed in each part of the scale-down window; the last part is still running.
    enough: tuple[int, ...] = (0,)
    part_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Floor:
    """Memory of days: the quantile of demand by hour of the week, and how long it was watched."""

    age_s: float = 0.0
    hour: int = -1  # the running hour of the week; -1 before the first
    seen: int = 0  # windows of the running hour
    hours: tuple[tuple[int, float], ...] = ()  # (hour of the week, replicas), sorted


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests that got their first token, and those among them found slow or late."""

    started: float = 0.0
    slow: float = 0.0  # above three quarters of a limit
    late: float = 0.0

    def plus(self, other: "Counts", weight: float = 1.0) -> "Counts":
        """The sum, in which these count with a weight."""
        return Counts(
            self.started * weight + other.started,
            self.slow * weight + other.slow,
            self.late * weight + other.late,
        )

    def share(self, count: float) -> float:
        """A count as a share of all requests; a late answer may have started long ago."""
        return count / max(1e-9, self.started, self.late)


@dataclass(frozen=True, slots=True)
class Feedback:
    """Memory of what was tried, and of who was late."""

    utilisation: float = _FIRST_BELIEF
    loads: tuple[float, ...] = ()  # demand per ready replica of the last windows
    open_s: float = 0.0
    replica_s: float = 0.0  # of ready replicas, in the window being filled
    # By quality class, in the window being filled.
    counts: tuple[tuple[str, Counts], ...] = ()
    hour: Counts = Counts()  # all classes; older requests count less

    def spent(self, attainment: float) -> float:
        """Share of the error budget that the late requests of the last hour have spent."""
        return self.hour.share(self.hour.late) / (1 - attainment)


@dataclass(frozen=True, slots=True)
class State:
    """The policy's memory; `State()` is an empty one.

    Except for `tick_s` it holds durations and no times, so a clock that jumps does no harm.
    """

    tick_s: float | None = None  # when the last tick was
    demand: Demand = field(default_factory=Demand)
    floor: Floor = field(default_factory=Floor)
    feedback: Feedback = field(default_factory=Feedback)
    traffic: Traffic = field(default_factory=Traffic)
    quality: Quality = field(default_factory=Quality)
    fleet: Fleet = field(default_factory=Fleet)

    def to_json(self) -> str:
        """What was learnt from traffic, and so outlives the controller."""
        learnt = _STATE.dump_python(self, include=_LEARNT, mode="json")
        return to_json(learnt | {"version": _LAYOUT}).decode()

    @classmethod
    def from_json(cls, text: str) -> "State":
        """A state that goes on from what `to_json` wrote. Raises DataError."""
        try:
            table = from_json(text)
            if table.get("version", _LAYOUT) != _LAYOUT:
                raise ValueError(f"its version is {table['version']}, not {_LAYOUT}")
            return _STATE.validate_python({name: table[name] for name in _LEARNT})
        except (ValueError, LookupError, AttributeError) as error:
            raise DataError(f"not a memory of the autoscaling policy: {error}") from None


_LEARNT = {"demand", "floor", "feedback", "traffic"}
_LAYOUT = 1  # of it; another one is not read
_STATE = TypeAdapter(State)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, the reason, and what to remember."""

    replicas: int
    threshold_setpoint: float | None  # None: publish nothing
    shed: float  # share of new unpinned requests to refuse with 429; 0 normally
    reason: str  # one sentence with the numbers that decided
    state: State
    # The rungs that a replica may choose from by itself (`LocalLoop`), the set-point first.
    rungs: tuple[Rung, ...] = ()
    needed: Need | None = None  # by what the number of replicas was chosen; None: it holds


def decide(
    sample: Sample, state: State, config: ScalingConfig, model: ServiceModel, now: float
) -> Decision:
    """The next replicas, threshold and share to shed. `now` is any clock in seconds.

    The answer lies within the configured bounds whatever the load is. It may be called at
    every step of the controller: the result depends on elapsed time, not on the number of calls.
    """
    passed = now - state.tick_s if state.tick_s is not None else 0.0
    # A clock that jumps counts as no time, or as the longest gap.
    dt = min(max(passed, 0.0), config.stale_after_s) if math.isfinite(passed) else 0.0
    fleet = state.fleet
    if fleet.asked == 0 < sample.target:
        # Serve itself has left zero for a first request, before any replica can report it.
        fleet = replace(fleet, asked=sample.target, idle_s=0.0)
    state = replace(state, fleet=fleet, tick_s=now if math.isfinite(now) else state.tick_s)
    before = sample.target if fleet.asked is None else fleet.asked
    if sample.age_s is None or sample.age_s > config.stale_after_s or sample.arrivals_per_s is None:
        least = 0 if config.scale_to_zero else config.min_replicas
        held = min(config.max_replicas, max(least, before))
        why = "there are no metrics"
        if sample.age_s is not None and sample.arrivals_per_s is not None:
            why = f"metrics are {sample.age_s:.0f} s old (limit {config.stale_after_s:g})"
        reason = f"Holding {_replicas(held)}: {why}."
        return Decision(held, None, state.quality.shed, reason, state)
    offered = sample.arrivals_per_s + sample.refused_per_s
    state = replace(state, traffic=observe_traffic(state.traffic, sample, model, dt))
    rungs = ladder(model, config, state.traffic)
    state = _remembered(sample, offered, state, config, rungs[0], dt)
    # Replicas without a report are assumed to be like the rest.
    decoding = sum(load.running for load in sample.loads)
    decoding *= max(1.0, sample.running / max(1, len(sample.loads)))
    pressure = Pressure(
        rate=state.demand.fast_per_s,
        in_system=decoding + sample.waiting,
        running=sample.running,
        deadline_s=max(config.slo.ttft_s, dt),
    )
    # Seconds that a replica ordered now takes; one that has been starting for longer counts.
    measured = sample.cold_start_s or fleet.cold_start_s or config.cold_start_s
    ages = [min(age, NO_ROOM * measured) for age in sample.starting_ages_s]
    cold_s = min(_LONGEST_COLD_START_S, max([measured, 1.0, *ages]))
    needed = _need(sample, state, config, rungs[0], pressure.in_system, cold_s)
    busy = offered > 0 or pressure.in_system > 0
    fleet = replace(fleet, cold_start_s=sample.cold_start_s or fleet.cold_start_s)
    asked, fleet = _ask(fleet, before, needed.replicas, busy, dt, cold_s, config)
    quality, allowed = _quality(sample, state, rungs, pressure, asked, config, dt)
    state = replace(state, fleet=fleet, quality=quality)
    reason = explain(needed, state, allowed, pressure, cold_s, config)
    return Decision(asked, quality.threshold, quality.shed, reason, state, allowed, needed)


def _remembered(
    sample: Sample, offered: float, state: State, config: ScalingConfig, best: Rung, dt: float
) -> State:
    """The state with this tick's requests, `offered` a second, and what a full window teaches."""
    attainment = config.slo.attainment
    span_s = fast_span_s(config)
    demand = observe_arrivals(state.demand, offered, dt, span_s, best.requests_per_s)
    tables = (sample.started, sample.slow, sample.late)
    counts = {
        name: Counts(*(dt * table.get(name, 0.0) for table in tables))
        for name in set().union(*tables)
    }
    feedback = observe_latencies(state.feedback, counts, sample.running, dt)
    full = demand.open_s == 0 and state.demand.open_s + dt > 0
    if full:
        feedback = learn(feedback, demand.windows[-1], attainment)
    floor = watch_floor(state.floor, demand, full, dt, sample.wall_s, attainment)
    return replace(state, demand=demand, feedback=feedback, floor=floor)


def _need(
    sample: Sample,
    state: State,
    config: ScalingConfig,
    best: Rung,
    in_system: float,
    cold_s: float,
) -> Need:
    present = present_demand(state.demand, best.requests_per_s)
    waiting = max(0.0, in_system - sample.running * best.sequences)
    backlog = 0.0
    if waiting > 0:
        # What will be waiting in a cold start's time is drained within as long again. Replicas on
        # their way are credited for the time that they will have served.
        coming = waiting / best.requests_per_s + present * cold_s
        starting_s = sum(min(age, cold_s) for age in sample.starting_ages_s)
        piled_up = coming - sample.running * cold_s - starting_s
        backlog = min(coming, max(0.0, piled_up)) / cold_s
    return Need(
        floor=floor_replicas(
            state.floor, state.demand, cold_s, sample.wall_s, config.slo.attainment
        ),
        present=present,
        backlog=backlog,
        utilisation=state.feedback.utilisation,
    )


def _quality(
    sample: Sample,
    state: State,
    rungs: tuple[Rung, ...],
    pressure: Pressure,
    asked: int,
    config: ScalingConfig,
    dt: float,
) -> tuple[Quality, tuple[Rung, ...]]:
    """The threshold from now on, and the rungs that the points spent allow."""
    quality, rates = state.quality, state.demand.rates
    usual = fmean(rates) if rates else pressure.rate
    traffic = min(_MOST_TRAFFIC, pressure.rate / usual) if usual > 0 else 0.0
    points = fmean(
        current(rungs, quality.threshold if own is None else own).points_lost
        for own in [load.threshold for load in sample.loads] or [None]
    )
    # Points lost at the set-point itself are the operator's choice: the budget does not count them.
    quality = spend(quality, max(0.0, points - rungs[0].points_lost), traffic, dt, config)
    allowed = rungs[:1] if quality.exhausted else rungs
    quality = steer(quality, allowed, pressure, dt)
    shed = 0.0
    if asked >= config.max_replicas:
        unpinned = 1 - dict(state.traffic.class_shares).get(PINNED, 0.0)
        shed = shed_share(allowed[-1], pressure, unpinned)
    return replace(quality, shed=shed), allowed


def watch_floor(
    floor: Floor, demand: Demand, full: bool, dt: float, wall_s: float, q: float
) -> Floor:
    """The floor after `dt` seconds; `full` if a window has been filled, `wall_s` the wall clock.

    Hours of the week count from wherever the clock does: only their distance matters.
    """
    floor = replace(floor, age_s=floor.age_s + dt)
    if not full:
        return floor
    hour = int(wall_s // _HOUR_S) % _WEEK
    if hour == floor.hour:
        return replace(floor, seen=floor.seen + 1)
    hours = dict(floor.hours)
    if floor.seen >= _SEEN_WINDOWS:
        hours[floor.hour] = quantile(demand.windows[-floor.seen :], q)
    return replace(floor, hour=hour, seen=1, hours=tuple(sorted(hours.items())))


def floor_replicas(floor: Floor, demand: Demand, ahead_s: float, wall_s: float, q: float) -> float:
    """Replicas to keep, at the set-point and with fractions, until `ahead_s` from now."""
    usual = demand.usual
    most = min(_UNSEEN * usual, _LARGE * math.sqrt(usual))
    unseen = usual + math.exp(-floor.age_s / _WATCHED_S) * most
    known, season = dict(floor.hours), 0.0
    for hour in {int((wall_s + ahead) // _HOUR_S) for ahead in (0.0, ahead_s + WINDOW_S)}:
        # This hour of the week, or else the newest of the same hour of other days.
        same = (known.get((hour - _DAY * days) % _WEEK) for days in range(7))
        season = max(season, next((kept for kept in same if kept is not None), 0.0))
    return max(quantile(demand.windows, q), unseen, season)


def quantile(windows: tuple[float, ...], q: float) -> float:
    """The least demand such that windows of at most it hold a share `q` of all demand."""
    ordered = sorted(windows)
    total = math.fsum(ordered)
    sums = accumulate(ordered)
    return next((w for w, s in zip(ordered, sums, strict=True) if s >= q * total - 1e-9), 0.0)


def observe_latencies(
    feedback: Feedback, counts: Mapping[str, Counts], ready: int, dt: float
) -> Feedback:
    """The feedback after `dt` seconds with `ready` replicas, and the requests counted in them."""
    sums = dict(feedback.counts)
    for name, count in counts.items():
        sums[name] = sums.get(name, Counts()).plus(count)
    return replace(
        feedback,
        open_s=feedback.open_s + dt,
        replica_s=feedback.replica_s + ready * dt,
        counts=tuple(sorted(sums.items())),
    )


def learn(feedback: Feedback, needed: float, attainment: float) -> Feedback:
    """The feedback at the end of a window that needed this many replicas."""
    ready = max(1e-9, feedback.replica_s / max(1e-9, feedback.open_s))
    loads = (*feedback.loads, min(needed / ready, 1e3))[-_LOADS:]
    seen = Counts()
    for _, count in feedback.counts:
        seen = seen.plus(count)
    hour = feedback.hour.plus(seen, weight=math.exp(-feedback.open_s / _BUDGET_S))
    closed = replace(feedback, loads=loads, hour=hour, open_s=0.0, replica_s=0.0, counts=())
    if not seen.started and not seen.late:
        return closed
    late = max(count.share(count.late) for _, count in feedback.counts)
    believed, tried = feedback.utilisation, max(loads)
    if late > 1 - attainment:
        if tried < _ABOVE * believed:
            believed = max(_LEAST_BELIEF, believed * (1 - _LESS * min(1.0, late / _MANY_LATE)))
    elif tried >= _TRIED * believed:
        near = _NEAR if closed.spent(attainment) >= _HALF else seen.share(seen.slow)
        room = max(0.0, 1 - near / _NEAR)
        believed = min(_MOST_BELIEF, believed * (1 + _MORE + _MUCH_MORE * room))
    return replace(closed, utilisation=believed)


def _ask(
    fleet: Fleet,
    before: int,
    needed: int,
    busy: bool,
    dt: float,
    cold_s: float,
    config: ScalingConfig,
) -> tuple[int, Fleet]:
    """Replicas to ask for after `dt` seconds in which `needed` were needed and `before` asked
    for; and the fleet, which remembers it."""
    idle_s = 0.0 if busy else fleet.idle_s + dt
    enough = (*fleet.enough[:-1], max(fleet.enough[-1], needed))
    part_s = fleet.part_s + dt
    if part_s >= max(_LEAST_WINDOW_S, _COLD_STARTS * cold_s) / _PARTS:
        enough, part_s = (*enough[-_PARTS:], needed), 0.0
    if config.scale_to_zero and not busy and (not before or idle_s >= config.idle_to_zero_s):
        # Serve itself also goes to zero only from one.
        asked = 1 if before > 1 else 0
    else:
        fewer = min(before, max(enough)) if len(enough) > _PARTS else before
        asked = min(config.max_replicas, max(config.min_replicas, 1, needed, fewer))
    return asked, replace(fleet, asked=asked, idle_s=idle_s, enough=enough, part_s=part_s)


def explain(
    needed: Need,
    state: State,
    rungs: Sequence[Rung],
    pressure: Pressure,
    cold_s: float,
    config: ScalingConfig,
) -> str:
    """The reason for a decision: replicas and threshold, each with its cause."""
    quality, asked = state.quality, state.fleet.asked or 0
    parts = [
        f"{_replicas(asked)} for {pressure.rate:.3g} requests/s, a cold start of {cold_s:.0f} s "
        f"({_why_replicas(needed, state, asked, config)})",
        f"threshold {quality.threshold:g} ({_why_threshold(state, rungs, pressure)})",
    ]
    if quality.shed:
        unpinned = 1 - dict(state.traffic.class_shares).get(PINNED, 0.0)
        refused = quality.shed * unpinned
        parts.append(f"refusing {refused:.0%} of the new requests, as the floor is full")
    return "; ".join(parts) + "."


def _why_replicas(needed: Need, state: State, asked: int, config: ScalingConfig) -> str:
    if asked == 0:
        return f"idle for {state.fleet.idle_s:.0f} s"
    if needed.replicas > asked:
        return f"the maximum, {needed.replicas} needed"
    if needed.replicas < asked:
        if asked == max(1, config.min_replicas):
            return "the minimum"
        return f"{needed.replicas} needed now, more within the scale-down window"
    used = f"at {needed.utilisation:.0%} utilisation"
    if needed.floor >= needed.present + needed.backlog:
        hours = state.floor.age_s / 3600
        return f"{needed.floor:.2f} kept by the record of {hours:.1f} h, {used}"
    backlog = f", {needed.backlog:.2g} for the backlog" if needed.backlog > 0.01 else ""
    return f"{needed.present:.2f} needed now{backlog}, {used}"


def _why_threshold(state: State, rungs: Sequence[Rung], pressure: Pressure) -> str:
    quality, best = state.quality, rungs[0]
    now = f"{pressure.rate:.3g} requests/s and {pressure.in_system:.0f} in the system"
    if quality.exhausted:
        return f"the budget is spent: {quality.spent_points:.2f} points"
    if quality.threshold != best.threshold:
        if quality.better_s > 0:
            return f"{now}, back in {max(0.0, RAISE_DWELL_S - quality.better_s):.0f} s"
        if pressure.enough(best):
            return f"{now}, the set-point would carry it, but no more"
        return f"{now}, the set-point would carry {max(0.0, pressure.admissible(best)):.3g}/s"
    if pressure.running and not pressure.enough(best) and len(rungs) == 1:
        return f"{now}, too much, but a lower one carries no more"
    return "the set-point"


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"
