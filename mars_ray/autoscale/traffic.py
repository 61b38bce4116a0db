"""Properties of the requests and speed of the engines, as slow means of the replicas' reports."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mars_ray.autoscale.sample import ReplicaLoad, Sample
from mars_ray.autoscale.service_model import Level, ServiceModel

# Means forget with this time constant, and are believed only after this many requests.
_FORGET_S = 300.0
# Requests that the lengths to begin with are worth.
_PRIOR = 10.0
# The service model counts as much as a measurement of this length.
_TRUST_S = 10.0
# A measurement further from the model than this means that one of them is wrong.
_LEAST_SLOW, _MOST_SLOW = 0.25, 4.0
_LEAST_GAIN, _MOST_GAIN = 0.2, 3.0
# Below this number of rows, a sequence's drafts tell nothing.
_DRAFTING = 1.5
# A class with a smaller share of the requests is forgotten.
_LEAST_SHARE = 1e-6
# Digits that count: finer changes would only cause ladders to be built again.
_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Traffic:
    """Means of requests, which of them may be lowered, and how the service model is wrong."""

    # Number of requests behind the means; old ones are slowly forgotten. The first ones count
    # beside as many as the beginning is worth.
    requests: float = 0.0
    prompts: float = _PRIOR
    answers: float = _PRIOR
    prompt_tokens: float = 512.0
    output_tokens: float = 128.0
    # (class or PINNED, share), sorted by name.
    class_shares: tuple[tuple[str, float], ...] = ()
    # Measured seconds of a step over the model's, and for how long that was measured.
    slowness: float = 1.0
    stepped_s: float = 0.0
    # (threshold, measured over modelled tokens of masks beyond the first), and for how long.
    drafted_s: float = 0.0
    gains: tuple[tuple[float, float], ...] = ()

    def rounded(self) -> "Traffic":
        """The same to few digits, so that ladders of nearly equal traffic are equal."""
        return Traffic(
            prompt_tokens=_digits(self.prompt_tokens),
            output_tokens=_digits(self.output_tokens),
            class_shares=tuple((name, round(share, 2)) for name, share in self.class_shares),
            slowness=round(self.slowness, 2),
            gains=tuple((threshold, round(gain, 1)) for threshold, gain in self.gains),
        )


def observe_traffic(traffic: Traffic, sample: Sample, model: ServiceModel, dt: float) -> Traffic:
    """The traffic after a tick of `dt` seconds with a checked sample."""
    arrived = sample.arrivals_per_s or 0.0
    requests, weight = _counted(traffic.requests, arrived, dt)
    prompts, prompt_weight = _counted(traffic.prompts, _or(sample.prompts_per_s, arrived), dt)
    answers, answer_weight = _counted(traffic.answers, _or(sample.answers_per_s, arrived), dt)
    slowness = _slowness(sample, traffic, model)
    positions = _positions(sample.loads)
    drafted = positions >= _DRAFTING and bool(sample.tokens_per_forward)
    return replace(
        traffic,
        requests=requests,
        prompts=prompts,
        answers=answers,
        prompt_tokens=_towards(traffic.prompt_tokens, sample.prompt_tokens, prompt_weight),
        output_tokens=_towards(traffic.output_tokens, sample.output_tokens, answer_weight),
        class_shares=_shares(traffic, sample, weight),
        slowness=_towards(traffic.slowness, slowness, _news(traffic.stepped_s, dt)),
        stepped_s=_longer(traffic.stepped_s, dt) if slowness is not None else traffic.stepped_s,
        gains=_gains(traffic, sample, model, positions, dt) if drafted else traffic.gains,
        drafted_s=_longer(traffic.drafted_s, dt) if drafted else traffic.drafted_s,
    )


def _or(rate: float | None, otherwise: float) -> float:
    return otherwise if rate is None else rate


def _counted(before: float, per_s: float, dt: float) -> tuple[float, float]:
    """The number of requests now, and the weight of the new ones among them."""
    new = per_s * dt
    count = before * math.exp(-dt / _FORGET_S) + new
    return count, new / count if new > 0 else 0.0


def _towards(old: float, new: float | None, weight: float) -> float:
    return old if new is None else old + weight * (new - old)


def _news(measured_s: float, dt: float) -> float:
    """Weight of the next `dt` seconds of measuring, against `measured_s` and the model's weight.

    Time without anything to measure forgets nothing.
    """
    return dt / (_TRUST_S + measured_s + dt)


def _longer(measured_s: float, dt: float) -> float:
    return min(_FORGET_S, measured_s + dt)


def _shares(traffic: Traffic, sample: Sample, weight: float) -> tuple[tuple[str, float], ...]:
    old, new = dict(traffic.class_shares), sample.class_shares
    names = sorted({*old, *new})
    mixed = ((name, _towards(old.get(name, 0.0), new.get(name, 0.0), weight)) for name in names)
    # A new share moves by a ten-thousandth in a tick of a busy fleet.
    return tuple((name, share) for name, share in mixed if share > _LEAST_SHARE)


def _slowness(sample: Sample, traffic: Traffic, model: ServiceModel) -> float | None:
    """Ratio of measured to expected step seconds over all busy replicas; None if there are none."""
    measured = expected = 0.0
    context = traffic.prompt_tokens + traffic.output_tokens / 2
    for load in sample.loads:
        known = load.decode_rows is not None and load.prompt_share is not None
        if load.running and load.step_s and known:
            measured += load.step_s
            expected += _expected_s(load, load.running * context, model)
    return min(_MOST_SLOW, max(_LEAST_SLOW, measured / expected)) if expected else None


def _expected_s(load: ReplicaLoad, context: float, model: ServiceModel) -> float:
    """Seconds of a mean step: the mean of steps with and without prompts, each at its own rows.

    Wherever the cost curve bends, the cost at the mean rows would be less than this mean.
    """
    rows, share = load.decode_rows or 0.0, load.prompt_share or 0.0
    longer = model.step_s(rows + (load.prompt_rows or 0.0), context) if share else 0.0
    return (1 - share) * model.step_s(rows, context) + share * longer


def _gains(
    traffic: Traffic, sample: Sample, model: ServiceModel, positions: float, dt: float
) -> tuple[tuple[float, float], ...]:
    """The gains after the replicas' reports; their decoding sequences had `positions` rows."""
    weight = _news(traffic.drafted_s, dt)
    old = dict(traffic.gains)
    gains = dict(old)
    for level in model.levels:
        live = sample.tokens_per_forward.get(level.threshold)
        if live is not None:
            gain = _gain(level, positions, live)
            gains[level.threshold] = _towards(old.get(level.threshold, 1.0), gain, weight)
    return tuple(sorted(gains.items()))


def _gain(level: Level, positions: float, live: float) -> float:
    said = level.tokens_per_forward(positions) - 1
    return min(_MOST_GAIN, max(_LEAST_GAIN, (live - 1) / said)) if said > 0.01 else 1.0


def _positions(loads: Sequence[ReplicaLoad]) -> float:
    """Mean rows of a decoding sequence, over all replicas."""
    known = [load for load in loads if load.running and load.positions]
    rows = sum(load.running * (load.positions or 0.0) for load in known)
    return rows / sum(load.running for load in known) if known else 0.0


def _digits(value: float) -> float:
    return float(f"{min(1e6, max(1.0, value)):.{_DIGITS}g}")
