"""The policy: how many replicas, at which threshold, and why.

One pure function serves the cluster, the simulator and the tests. Two loops read one sample. The
slow loop orders replicas for the load expected when they are ready, at the set-point quality
(`forecast.py`, `replica_count.py`). The fast loop lowers the threshold when the present replicas
cannot carry the load (`threshold_control.py`), choosing among the thresholds that gain capacity for
this traffic (`operating_points.py`, `service_model.py`). As the slow loop never sees the fast one's
threshold, quality recovers as replicas arrive (mid-ranging). Each file's docstring has its law.

Missing or old metrics change nothing: the last decision holds and nothing is published.
"""

import math
from dataclasses import replace
from statistics import fmean

from mars_ray.autoscale.estimate import Seen, see
from mars_ray.autoscale.explain import explain, holding
from mars_ray.autoscale.operating_points import Rung
from mars_ray.autoscale.replica_count import Fleet, Need, ask, need, remember, woken
from mars_ray.autoscale.sample import Sample
from mars_ray.autoscale.service_model import ServiceModel
from mars_ray.autoscale.state import Decision, State
from mars_ray.autoscale.threshold_control import Quality, current, dearer, shed_share, spend, steer
from mars_ray.config.scaling import ScalingConfig

# A second of heavy traffic counts at most this many times as much as a usual one.
_MOST_TRAFFIC = 10.0


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
    seen = see(sample, state, config, model, dt)
    needed = _need(seen, state.quality, config)
    fleet = _fleet(seen, needed, state.fleet, config, dt)
    quality = _quality(seen, fleet, state.quality, config, dt)
    state = replace(
        state,
        load=seen.load,
        surge=seen.surge,
        traffic=seen.traffic,
        fleet=fleet,
        quality=quality,
    )
    reason = explain(seen, needed, fleet, quality, config)
    rungs = _allowed(seen, quality)
    return Decision(fleet.asked or 0, quality.threshold, quality.shed, reason, state, rungs)


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


def _allowed(seen: Seen, quality: Quality) -> tuple[Rung, ...]:
    return seen.rungs[:1] if quality.exhausted else seen.rungs


def _need(seen: Seen, quality: Quality, config: ScalingConfig) -> Need:
    rungs = _allowed(seen, quality)
    return need(seen.ahead, rungs, config, dearer(quality, config), seen.extra_rate)


def _fleet(seen: Seen, needed: Need, fleet: Fleet, config: ScalingConfig, dt: float) -> Fleet:
    # A replica given up sooner would cost more to get back than to keep.
    window_s = max(seen.cold_start_s, config.scale_down_window_s)
    fleet = remember(fleet, needed.replicas, seen.busy, dt, window_s)
    before = seen.sample.target if fleet.asked is None else fleet.asked
    asked = ask(fleet, before, needed.replicas, seen.stay_s, config)
    measured_s = seen.sample.cold_start_s or fleet.cold_start_s
    return replace(fleet, asked=asked, cold_start_s=measured_s)


def _quality(
    seen: Seen, fleet: Fleet, quality: Quality, config: ScalingConfig, dt: float
) -> Quality:
    usual = fmean(seen.load.rates) if seen.load.rates else seen.load.fast
    traffic = min(_MOST_TRAFFIC, seen.load.fast / usual) if usual > 0 else 0.0
    points = fmean(
        current(seen.rungs, quality.threshold if own is None else own).points_lost
        for own in [load.threshold for load in seen.sample.loads] or [None]
    )
    # Points lost at the set-point itself are the operator's choice: the budget does not count them.
    lowered = max(0.0, points - seen.rungs[0].points_lost)
    quality = spend(quality, lowered, traffic, dt, config)
    rungs = _allowed(seen, quality)
    quality = steer(quality, rungs, seen.pressure, dt, config)
    at_maximum = (fleet.asked or 0) >= config.max_replicas
    shed = shed_share(rungs[-1], seen.pressure, seen.unpinned) if at_maximum else 0.0
    return replace(quality, shed=shed)
