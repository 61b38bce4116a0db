"""What pays: `verified` beside plain decoding, and a threshold below, always or as a valve."""

from collections.abc import Iterator
from dataclasses import dataclass

from mars_ray.advise.fleets import Fleets, Way
from mars_ray.simulator.cases import Case

# Less is within the error of a service model.
_LEAST = 5.0  # percent of replica-hours
_LEAST_KEPT = 0.1  # percent of requests


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer to one question, with its numbers."""

    question: str
    pays: bool
    why: str


Found = dict[Way, Fleets]


def best(found: Found) -> tuple[Way, Fleets] | None:
    """The lossless way with the fewest replica-hours by the hour; None if none keeps the
    objective."""
    kept = [(way, fleets) for way, fleets in found.items() if way.lossless and fleets.replica_hours]
    return min(kept, key=lambda item: item[1].replica_hours or 0.0, default=None)


def verdicts(found: Found, case: Case) -> list[Verdict]:
    """Verdicts on one objective. A way saves if its fleet by the hour takes at least 5% fewer
    replica-hours, and as many percent as its answers lose points of accuracy."""
    plain, *others = found.items()
    lossless = [item for item in others if item[0].lossless]
    lower = [item for item in others if not item[0].lossless]
    said = [_pays(f"Does `{way.name}` pay?", plain, (way, fleets)) for way, fleets in lossless]
    base = (lossless or [plain])[0]
    for item in lower:
        said.append(_pays(f"Does `{item[0].name}` pay for all answers?", base, item))
        said += _valve(base, item, case.slo.attainment)
    return said


def _pays(question: str, base: tuple[Way, Fleets], other: tuple[Way, Fleets]) -> Verdict:
    (way, before), (_, after) = base, other
    points = after.points_lost
    costs = f", for {points:.1f} points" if points else ""
    if after.replica_hours is None:
        return Verdict(question, False, "with it, too, no fleet keeps the objective")
    if before.replica_hours is None:
        why = f"with {way.name} no fleet keeps the objective, with it one does{costs}"
        return Verdict(question, True, why)
    saved = 100 * (1 - after.replica_hours / before.replica_hours)
    carries = after.capacity_rps / before.capacity_rps
    why = (
        f"by the hour {after.replica_hours:.1f} replica-hours instead of "
        f"{before.replica_hours:.1f} with {way.name}{costs}; a replica carries {carries:.2f} times "
        "the requests"
    )
    return Verdict(question, saved >= max(_LEAST, points), why)


def _valve(base: tuple[Way, Fleets], other: tuple[Way, Fleets], wanted: float) -> Iterator[Verdict]:
    """Whether our policy does better if it may lower the threshold for a while: more requests in
    time than points lost where they were too few, else replica-hours."""
    (way, (before, after)) = other[0], (base[1].scaled, other[1].scaled)
    if before is None or after is None:
        return
    saved = 100 * (1 - after.replica_hours / before.replica_hours)
    kept = 100 * (after.attainment - before.attainment)
    if before.attainment < wanted:
        pays = kept > max(_LEAST_KEPT, after.points_lost)
    else:
        pays = after.attainment >= wanted and saved >= max(_LEAST, after.points_lost)
    yield Verdict(
        f"Does `{way.name}` pay as a valve, in overloads alone?",
        pays,
        f"scaled by our policy, {after.attainment:.2%} in time at {after.replica_hours:.1f} "
        f"replica-hours instead of {before.attainment:.2%} at {before.replica_hours:.1f}; the "
        f"threshold is low for {after.below_set_point_s:.0f} s, {after.points_lost:.2f} points",
    )
