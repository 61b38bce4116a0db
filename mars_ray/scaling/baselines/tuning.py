"""Each policy at its best.

Every one but the mean gets a knob (the load per replica that it aims at, the latency that it aims
at, its number of replicas; those that count capacity as ours does, the fewest replicas and the time
per token that it is counted at) and is tuned: the cheapest setting that reaches the attainment on
the tuning seeds, else the safest one. So nobody loses for a default that suits another service, and
nobody wins for missing the objective.
"""

from dataclasses import dataclass

from mars_ray.config.simulate import PolicyName
from mars_ray.scaling.baselines.contenders import Contender, Knob, Setting, contender, run


def tuned(settings: list[Setting], name: PolicyName) -> Knob:
    """The cheapest setting that reaches the attainment on every one of these; else the safest.

    Bisection of the values at each aim: a safer one is taken to attain and to cost no less.
    """
    others = [contender(name, setting) for setting in settings]
    best = None
    for aim in others[0].aims:
        best = _better(best, _tuned(settings, others, aim, best))
    assert best is not None
    return best.knob


@dataclass(frozen=True, slots=True)
class _Trial:
    """What came of one setting, on all tuning seeds or up to the first that missed."""

    knob: Knob
    reached: bool
    attainment: float  # the least
    replica_s: float


def _better(one: _Trial | None, other: _Trial) -> _Trial:
    if one is None or other.reached > one.reached:
        return other
    if one.reached:
        return other if other.reached and other.replica_s < one.replica_s else one
    return other if other.attainment > one.attainment else one


def _tuned(
    settings: list[Setting], others: list[Contender], aim: float, best: _Trial | None
) -> _Trial:
    values = others[0].values
    low, high = 0, len(values) - 1
    found = None
    while low < high:
        middle = (low + high) // 2
        trial = _tried(settings, others, Knob(values[middle], aim))
        if trial.reached:
            high, found = middle, trial
        elif best and best.reached and trial.replica_s > best.replica_s:
            return found or trial
        else:
            low = middle + 1
    return found or _tried(settings, others, Knob(values[low], aim))


def _tried(settings: list[Setting], others: list[Contender], knob: Knob) -> _Trial:
    slo = settings[0].job.scaling.slo
    least, seconds = 1.0, 0.0
    for seed, (setting, other) in enumerate(zip(settings, others, strict=True)):
        outcome = run(setting, other, knob, seed)
        seconds += outcome.replica_s
        least = min(least, float(outcome.within(slo).mean()))
        if least < slo.attainment:
            return _Trial(knob, False, least, seconds)
    return _Trial(knob, True, least, seconds)
