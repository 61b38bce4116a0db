"""What masks bring and cost in `verified`: tokens and rows per forward, by window and groups.

Where every sequence has the same in every step. An engine chooses for each sequence by the
confidences of its drafts (`core.draft_choice`) and does a little better.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import accumulate
from operator import mul


@dataclass(frozen=True, slots=True)
class Uniform:
    """Masks of a group, and outcomes that get a group."""

    window: int
    groups: int


@dataclass(frozen=True, slots=True)
class Yield:
    """What a sequence commits and costs per forward with it, in the long run."""

    tokens: float
    rows: float


def expected(uniform: Uniform, rates: Several[float]) -> Yield:
    """After an outcome without masks, a step has no drafts: it commits a token and drafts anew.

    With c the probability that an outcome has masks, a share f of the forwards has drafts:
    f = f * c + (1 - f), as a forward without drafts has one outcome, whose masks it has.
    """
    survival = list(accumulate(rates[: uniform.window], mul))
    if not survival:
        return Yield(1.0, 1.0)
    reached = [1.0, *survival]
    outcomes = [a - b for a, b in zip(reached, [*survival, 0.0], strict=True)]
    covered = (
        survival[-1]
        if uniform.groups == 1
        else sum(sorted(outcomes, reverse=True)[: uniform.groups])
    )
    drafted = 1 / (2 - covered)
    rows = 1 + drafted * uniform.window * (1 + uniform.groups) + (1 - drafted) * uniform.window
    return Yield(1 + drafted * sum(survival), rows)


def all_uniform(window: int, most_rows: int) -> list[Uniform]:
    """No masks first; then every window with one, two, four ... and all outcomes, as they fit."""
    options = [Uniform(0, 1)]
    for masks in range(1, window + 1):
        counts = {1, 2, 4, 8, 16, 32, masks + 1}
        options += [
            Uniform(masks, count)
            for count in sorted(counts)
            if count <= masks + 1 and 1 + masks + count * masks <= most_rows
        ]
    return options
