"""A decision in one sentence, with its deciding numbers (docs/autoscaling.md explains each)."""

from collections.abc import Sequence

from mars_ray.autoscale.operating_points import Rung
from mars_ray.autoscale.replica_count import Need
from mars_ray.autoscale.sample import PINNED, Sample
from mars_ray.autoscale.state import State
from mars_ray.autoscale.valve import RAISE_DWELL_S, Pressure
from mars_ray.config.scaling import ScalingConfig


def holding(sample: Sample, replicas: int, config: ScalingConfig) -> str:
    """The reason for changing nothing: metrics are missing or old."""
    if sample.age_s is None or sample.arrivals_per_s is None:
        return f"Holding {_replicas(replicas)}: there are no metrics."
    limit = config.stale_after_s
    return f"Holding {_replicas(replicas)}: metrics are {sample.age_s:.0f} s old (limit {limit:g})."


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
