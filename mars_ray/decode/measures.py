"""What live traffic says about the threshold, without a forward of its own.

Every step sees how good each of its proposals is, so it knows how many tokens *each* threshold
would have committed in it; and a token that was committed without being the model's own choice is
forwarded as a real token anyway, when the row before it tells what that choice would have been.
"""

from bisect import bisect_right
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import accumulate

from mars_ray.config.decode import BlockCachedMode, ConfidenceMode, VerifiedMode
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import Plan, Rows

THRESHOLDS = (0.0, 0.01, 0.03, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


@dataclass(slots=True)
class ModeMeasures:
    """Sums over the steps of one mode; additive over engines."""

    forwards: int = 0
    # Tokens that each of THRESHOLDS would have committed in these steps.
    tokens_at: list[int] = field(default_factory=lambda: [0] * len(THRESHOLDS))
    # Tokens that need not have been the model's own choice, and how many were not.
    checked: int = 0
    disagreed: int = 0

    def tokens_per_forward(self) -> dict[float, float]:
        """The curve of T/F over thresholds, as far as single steps can tell it."""
        forwards = max(1, self.forwards)
        return {t: n / forwards for t, n in zip(THRESHOLDS, self.tokens_at, strict=True)}

    @property
    def disagreement(self) -> float:
        """Share of all checked tokens; 0 if there were none."""
        return self.disagreed / self.checked if self.checked else 0.0


class LiveMeasures:
    """Fed by the engine with every step of every sequence."""

    def __init__(self) -> None:
        self.by_mode: dict[str, ModeMeasures] = {}

    def observe(self, sequence: Sequence, plan: Plan, rows: Rows, tokens: Several[int]) -> None:
        """Before the step's `tokens` are committed."""
        mode = sequence.request.mode
        match mode:
            case VerifiedMode():
                drafts = len(plan.drafts)
                values = rows.numbers["ratio"][:drafts]
                chosen = zip(rows.best, tokens[:-1], strict=False)
            case ConfidenceMode(measure="probability") | BlockCachedMode(measure="probability"):
                values = rows.numbers["probability"][1:]
                chosen = zip(rows.earlier, sequence.tokens[-len(rows.earlier) :], strict=False)
            case _:
                return
        measures = self.by_mode.setdefault(mode.type, ModeMeasures())
        measures.forwards += 1
        _count(measures.tokens_at, values)
        for own, token in chosen:
            measures.checked += 1
            measures.disagreed += own != token


def _count(tokens_at: list[int], values: Several[float]) -> None:
    """Add to each threshold 1 and the length of the leading run of values at or above it."""
    # A run goes on while the smallest value so far does: all thresholds up to it count the token.
    for index in range(len(THRESHOLDS)):
        tokens_at[index] += 1
    for least in accumulate(values, min):
        for index in range(bisect_right(THRESHOLDS, least)):
            tokens_at[index] += 1
