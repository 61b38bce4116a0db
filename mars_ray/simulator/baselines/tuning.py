"""Tuning of each policy, so that policies are compared at their best.

Every policy except the mean has a knob: its target load per replica, its target latency, or its
number of replicas. Policies that count capacity as ours does have three settings: the fewest
replicas, the time per token at which capacity is counted, and how much of a load's spread they
provide for. Tuning takes the cheapest setting that reaches the attainment on the tuning seeds, else
the safest one. A setting costs its replicas and, at the job's prices, the points that it loses. So
no policy loses because its default suits another service, and none wins by missing the objective.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from mars_ray.simulator.baselines.contenders import Contender, Knob, Manner, Setting, contender, run
from mars_ray.simulator.config import PolicyName
from mars_ray.simulator.engine.result import summarise


def tuned(settings: list[Setting], name: PolicyName) -> Knob:
    """The cheapest knob setting that reaches the attainment in all `settings`, else the safest.

    In each manner the values are bisected: a value safer than one that attains is assumed to attain
    too, with no fewer replicas. If the value found loses points, safer ones may cost less. They are
    tried as long as they do, from the first value that makes a difference to the fleet.
    """
    others = [contender(name, setting) for setting in settings]
    best = None
    for manner in others[0].manners:
        for trial in _trials(settings, others, manner, best):
            best = _better(best, trial)
    assert best is not None
    return best.knob


@dataclass(frozen=True, slots=True)
class _Trial:
    """The result of one setting, on all tuning seeds or up to the first that missed."""

    knob: Knob
    reached: bool
    attainment: float  # the least of the seeds
    replica_s: float
    cost: float  # in replica-seconds
    mean_replicas: float  # over the seeds


def _better(one: _Trial | None, other: _Trial) -> _Trial:
    if one is None or other.reached > one.reached:
        return other
    if one.reached:
        return other if other.reached and other.cost < one.cost else one
    return other if other.attainment > one.attainment else one


def _trials(
    settings: list[Setting], others: list[Contender], manner: Manner, best: _Trial | None
) -> Iterator[_Trial]:
    """The trials in this manner that can be the best."""
    found = _cheapest(settings, others, manner, best)
    if found is None:
        return
    yield found
    if found.reached and found.cost > found.replica_s:
        yield from _safer(settings, others, found)


def _cheapest(
    settings: list[Setting], others: list[Contender], manner: Manner, best: _Trial | None
) -> _Trial | None:
    """Find by bisection the trial with the fewest replicas that attains, else the safest.

    The search ends early, with its result so far, if all others would cost more than the best.
    """
    values = others[0].values
    low, high = 0, len(values) - 1
    found = None
    while low < high:
        middle = (low + high) // 2
        trial = _tried(settings, others, Knob(values[middle], manner))
        if trial.reached:
            high, found = middle, trial
        elif best and best.reached and trial.replica_s > best.cost:
            return found
        else:
            low = middle + 1
    return found or _tried(settings, others, Knob(values[low], manner))


def _safer(settings: list[Setting], others: list[Contender], found: _Trial) -> Iterator[_Trial]:
    """Trials of safer values than one that loses points, while they cost less."""
    usual = int(found.mean_replicas)
    for value in (v for v in others[0].values if v > found.knob.value and v >= usual):
        above = _tried(settings, others, Knob(value, found.knob.manner))
        if not above.reached:
            continue  # it was not run to its end
        if above.cost >= found.cost:
            return
        found = above
        yield found


def _tried(settings: list[Setting], others: list[Contender], knob: Knob) -> _Trial:
    job = settings[0].job
    wanted = job.scaling.slo.attainment
    point = job.scaling.prices.point_hour / job.scaling.prices.replica_hour
    least, seconds, cost, fleets = 1.0, 0.0, 0.0, []
    for seed, (setting, other) in enumerate(zip(settings, others, strict=True)):
        figures = summarise(run(setting, other, knob, seed), job.scaling.slo, job.accuracy)
        seconds += figures["replica_s"]
        cost += figures["replica_s"] * (1 + point * figures["points_lost"])
        fleets.append(figures["mean_replicas"])
        least = min(least, figures["attainment"])
        if least < wanted:
            break
    return _Trial(knob, least >= wanted, least, seconds, cost, fmean(fleets))
