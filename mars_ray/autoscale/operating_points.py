"""The thresholds worth using, and what a replica carries at each, for the present traffic.

Work adds up: with share s_c of the requests at a level that carries K_c of them per second, a
replica carries 1 / sum(s_c / K_c). Pinned requests stay lossless and a quality class stays at its
floor. So the fewer requests may be lowered, the less capacity a lower threshold gains.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from mars_ray.autoscale.sample import PINNED
from mars_ray.autoscale.service_model import Mix, ServiceModel
from mars_ray.autoscale.traffic import Traffic
from mars_ray.config.scaling import ScalingConfig

# A rung must carry at least this much more than the one before; less is within the model's error.
_LEAST_GAIN = 0.03


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
    bounds = config.threshold
    return _ladder(
        model,
        traffic.rounded(),
        bounds.set_point,
        bounds.floor,
        floors,
        config.slo.time_per_token_s,
    )


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
        if not rungs or _worth(rung, rungs[-1]):
            rungs.append(rung)
    return tuple(rungs)


def _worth(rung: Rung, above: Rung) -> bool:
    """Whether a rung's answers in time outweigh its additional wrong answers.

    In an overload a late answer is worth nothing, so a percent more capacity is worth a point.
    """
    gain = rung.requests_per_s / above.requests_per_s - 1
    return gain > max(_LEAST_GAIN, (rung.points_lost - above.points_lost) / 100)


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
