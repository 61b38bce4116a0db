"""A decision in one sentence, with its deciding numbers (docs/autoscaling.md explains each)."""

from mars_ray.autoscale.estimate import Seen
from mars_ray.autoscale.replica_count import Fleet, Need, covered
from mars_ray.autoscale.sample import Sample
from mars_ray.autoscale.threshold_control import Quality
from mars_ray.config.scaling import ScalingConfig


def holding(sample: Sample, replicas: int, config: ScalingConfig) -> str:
    """The reason for changing nothing: metrics are missing or old."""
    if sample.age_s is None or sample.arrivals_per_s is None:
        return f"Holding {_replicas(replicas)}: there are no metrics."
    limit = config.stale_after_s
    return f"Holding {_replicas(replicas)}: metrics are {sample.age_s:.0f} s old (limit {limit:g})."


def explain(seen: Seen, needed: Need, fleet: Fleet, quality: Quality, config: ScalingConfig) -> str:
    """The reason for a decision: replicas and threshold, each with its cause."""
    ahead = seen.ahead
    surge = "a surge of " if ahead.surge else ""
    load = f"{surge}{ahead.mean:.3g} ± {ahead.sigma:.2g} requests/s in {seen.cold_start_s:.0f} s"
    parts = [
        f"{_replicas(fleet.asked or 0)} for {load} ({_why_replicas(needed, fleet, seen, config)})",
        f"threshold {quality.threshold:g} ({_why_threshold(seen, quality, config)})",
    ]
    if quality.shed:
        refused = quality.shed * seen.unpinned
        parts.append(f"refusing {refused:.0%} of the new requests, as the floor is full")
    return "; ".join(parts) + "."


def _why_replicas(needed: Need, fleet: Fleet, seen: Seen, config: ScalingConfig) -> str:
    asked = fleet.asked or 0
    if asked == 0:
        return f"idle for {fleet.idle_s:.0f} s"
    if needed.replicas > asked:
        return f"the maximum, {needed.replicas} needed"
    if needed.replicas < asked:
        if asked == max(1, config.min_replicas):
            return "the minimum"
        return f"{needed.replicas} needed now, more within the scale-down window"
    if needed.priced > max(needed.mean, needed.floor) + 1:
        return "the last one saves more quality than it costs"
    if needed.floor >= needed.mean:
        lowest = seen.rungs[-1].threshold
        return (
            f"{needed.floor:.2f} at threshold {lowest:g} for {_percent(covered(config))} of loads"
        )
    backlog = f", {seen.extra_rate:.2g}/s of it backlog" if seen.extra_rate > 0.01 else ""
    return f"{needed.mean:.2f} at the set-point{backlog}"


def _why_threshold(seen: Seen, quality: Quality, config: ScalingConfig) -> str:
    pressure, best = seen.pressure, seen.rungs[0]
    now = f"{pressure.rate:.3g} requests/s and {pressure.in_system:.0f} in the system"
    if quality.exhausted:
        return f"the budget is spent: {quality.spent_points:.2f} points"
    if quality.threshold != best.threshold:
        if quality.better_s > 0:
            return f"{now}, back in {max(0.0, config.raise_dwell_s - quality.better_s):.0f} s"
        if pressure.enough(best):
            return f"{now}, the set-point would carry it, but no more"
        return f"{now}, the set-point would carry {max(0.0, pressure.admissible(best)):.3g}/s"
    if pressure.running and not pressure.enough(best) and len(seen.rungs) == 1:
        return f"{now}, too much, but a lower one carries no more"
    return "the set-point"


def _percent(share: float) -> str:
    """A whole percentage where that is accurate enough: 99.9% must not become 100%."""
    return f"{share:.0%}" if share < 0.99 else f"{100 * share:.4g}%"


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"
