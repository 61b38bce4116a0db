"""The policy: how many replicas, at which threshold, and why.

One pure function serves the cluster, the simulator and the tests. Two loops read one sample. The
slow loop orders replicas at the set-point quality: for what arrives, for what is known of this
service (`floor.py`), and by what latencies have taught about a replica (`feedback.py`,
`replica_count.py`). The fast loop lowers the threshold when the present replicas cannot carry the
load (`valve.py`), choosing among the thresholds that gain capacity for this traffic
(`operating_points.py`, `service_model.py`). As the slow loop never sees the fast one's threshold,
quality recovers as replicas arrive (mid-ranging). Each file's docstring has its law.

Missing or old metrics change nothing: the last decision holds and nothing is published.
"""

import math
from dataclasses import replace
from statistics import fmean

from mars_ray.autoscale import demand as demands
from mars_ray.autoscale import feedback as feedbacks
from mars_ray.autoscale import floor as floors
from mars_ray.autoscale.explain import explain, holding
from mars_ray.autoscale.operating_points import Rung, ladder
from mars_ray.autoscale.replica_count import Fleet, Need, ask, backlog, remember, woken
from mars_ray.autoscale.sample import NO_ROOM, PINNED, Sample
from mars_ray.autoscale.service_model import ServiceModel
from mars_ray.autoscale.state import Decision, State
from mars_ray.autoscale.traffic import observe_traffic
from mars_ray.autoscale.valve import (
    Pressure,
    Quality,
    current,
    fast_span_s,
    shed_share,
    spend,
    steer,
)
from mars_ray.config.scaling import ScalingConfig

# A second of heavy traffic counts at most this many times as much as a usual one.
_MOST_TRAFFIC = 10.0
_LONGEST_COLD_START_S = 3600.0


def decide(
    sample: Sample, state: State, config: ScalingConfig, model: ServiceModel, now: float
) -> Decision:
    """The next replicas, threshold and share to shed. `now` is any clock in seconds.

    The answer lies within the configured bounds whatever the sample holds. It may be called at
    every step of the controller: the result depends on elapsed time, not on the number of calls.
    """
    sample = sample.checked()
    dt = _elapsed(state.tick_s, now, config)
    fleet = woken(state.fleet, sample.target)
    state = replace(state, fleet=fleet, tick_s=now if math.isfinite(now) else state.tick_s)
    if sample.age_s is None or sample.age_s > config.stale_after_s or sample.arrivals_per_s is None:
        return _hold(sample, state, config)
    state = replace(state, traffic=observe_traffic(state.traffic, sample, model, dt))
    rungs = ladder(model, config, state.traffic)
    state = _remembered(sample, state, config, rungs[0], dt)
    pressure = _pressure(sample, state, config, dt)
    cold_s = _cold_start_s(sample, state.fleet, config)
    needed = _need(sample, state, config, rungs[0], cold_s)
    fleet = _fleet(sample, state, needed, pressure, config, dt, cold_s)
    quality = _quality(sample, state, rungs, pressure, fleet, config, dt)
    state = replace(state, fleet=fleet, quality=quality)
    allowed = _allowed(rungs, quality)
    reason = explain(needed, state, allowed, pressure, cold_s, config)
    return Decision(
        fleet.asked or 0, quality.threshold, quality.shed, reason, state, allowed, needed
    )


def _elapsed(before: float | None, now: float, config: ScalingConfig) -> float:
    """Seconds since the last tick; a clock that jumps counts as no time, or as the longest gap."""
    passed = now - before if before is not None else 0.0
    return min(max(passed, 0.0), config.stale_after_s) if math.isfinite(passed) else 0.0


def _hold(sample: Sample, state: State, config: ScalingConfig) -> Decision:
    asked = sample.target if state.fleet.asked is None else state.fleet.asked
    least = 0 if config.scale_to_zero else config.min_replicas
    replicas = min(config.max_replicas, max(least, asked))
    reason = holding(sample, replicas, config)
    return Decision(replicas, None, state.quality.shed, reason, state)


def _allowed(rungs: tuple[Rung, ...], quality: Quality) -> tuple[Rung, ...]:
    return rungs[:1] if quality.exhausted else rungs


def _offered(sample: Sample) -> float:
    return (sample.arrivals_per_s or 0.0) + (sample.refused_per_s or 0.0)


def _remembered(
    sample: Sample, state: State, config: ScalingConfig, best: Rung, dt: float
) -> State:
    """The state with this tick's requests, and what a full window teaches."""
    attainment = config.slo.attainment
    demand = demands.observe(
        state.demand, _offered(sample), dt, fast_span_s(config), best.requests_per_s
    )
    counts = _counts(sample, dt)
    feedback = feedbacks.observe(state.feedback, counts, sample.running, dt)
    full = demand.open_s == 0 and state.demand.open_s + dt > 0
    if full:
        feedback = feedbacks.learn(feedback, demand.windows[-1], attainment)
    floor = floors.watch(state.floor, demand, full, dt, sample.wall_s or 0.0, attainment)
    return replace(state, demand=demand, feedback=feedback, floor=floor)


def _counts(sample: Sample, dt: float) -> dict[str, feedbacks.Counts]:
    """Requests by class that started in `dt` seconds, and those that were found slow or late."""
    tables = (sample.started, sample.slow, sample.late)
    names = set().union(*tables)
    return {
        name: feedbacks.Counts(*(dt * table.get(name, 0.0) for table in tables)) for name in names
    }


def _pressure(sample: Sample, state: State, config: ScalingConfig, dt: float) -> Pressure:
    return Pressure(
        rate=state.demand.fast_per_s,
        in_system=_in_system(sample),
        running=sample.running,
        deadline_s=max(config.slo.ttft_s, dt),
    )


def _in_system(sample: Sample) -> float:
    """Requests decoding or waiting; replicas without a report are assumed to be like the rest."""
    decoding = sum(load.running for load in sample.loads)
    if sample.loads:
        decoding *= max(1.0, sample.running / len(sample.loads))
    waiting = sample.waiting
    return decoding + (sum(load.waiting for load in sample.loads) if waiting is None else waiting)


def _cold_start_s(sample: Sample, fleet: Fleet, config: ScalingConfig) -> float:
    """Seconds that a replica ordered now takes; one that has been starting for longer counts."""
    measured = sample.cold_start_s or fleet.cold_start_s or config.cold_start_s
    ages = [min(age, NO_ROOM * measured) for age in sample.starting_ages_s]
    return min(_LONGEST_COLD_START_S, max([measured, 1.0, *ages]))


def _need(sample: Sample, state: State, config: ScalingConfig, best: Rung, cold_s: float) -> Need:
    demand, attainment = state.demand, config.slo.attainment
    floor = floors.replicas(state.floor, demand, cold_s, sample.wall_s or 0.0, attainment)
    present = demands.present(demand, best.requests_per_s)
    waiting = max(0.0, _in_system(sample) - sample.running * best.sequences)
    starting_s = sum(min(age, cold_s) for age in sample.starting_ages_s)
    return Need(
        floor=floor,
        present=present,
        backlog=backlog(waiting, present, best.requests_per_s, starting_s, sample.running, cold_s),
        utilisation=state.feedback.utilisation,
    )


def _fleet(
    sample: Sample,
    state: State,
    needed: Need,
    pressure: Pressure,
    config: ScalingConfig,
    dt: float,
    cold_s: float,
) -> Fleet:
    busy = _offered(sample) > 0 or pressure.in_system > 0
    before = sample.target if state.fleet.asked is None else state.fleet.asked
    fleet = remember(state.fleet, needed.replicas, busy, dt, cold_s)
    asked = ask(fleet, before, needed.replicas, busy, config)
    return replace(fleet, asked=asked, cold_start_s=sample.cold_start_s or fleet.cold_start_s)


def _quality(
    sample: Sample,
    state: State,
    rungs: tuple[Rung, ...],
    pressure: Pressure,
    fleet: Fleet,
    config: ScalingConfig,
    dt: float,
) -> Quality:
    quality, rates = state.quality, state.demand.rates
    usual = fmean(rates) if rates else pressure.rate
    traffic = min(_MOST_TRAFFIC, pressure.rate / usual) if usual > 0 else 0.0
    points = fmean(
        current(rungs, quality.threshold if own is None else own).points_lost
        for own in [load.threshold for load in sample.loads] or [None]
    )
    # Points lost at the set-point itself are the operator's choice: the budget does not count them.
    quality = spend(quality, max(0.0, points - rungs[0].points_lost), traffic, dt, config)
    allowed = _allowed(rungs, quality)
    quality = steer(quality, allowed, pressure, dt)
    at_maximum = (fleet.asked or 0) >= config.max_replicas
    unpinned = 1 - dict(state.traffic.class_shares).get(PINNED, 0.0)
    shed = shed_share(allowed[-1], pressure, unpinned) if at_maximum else 0.0
    return replace(quality, shed=shed)
