"""The threshold in force for requests that pin none.

A request may name the lowest threshold that it tolerates. The threshold in force is then the
service's set-point, but never below that floor. At 1 an answer is that of plain decoding:
`verified` accepts nothing else, and `confidence` has no masks then. Or, in modes
that verify, a request states a budget: the share of its tokens that may differ from AR decoding.
The threshold in force is then found by feedback. Whatever the feedback does, no answer exceeds its
budget at any moment.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

# Start, speed and lower bound of the search for a budget's threshold.
_FIRST, _GAIN, _LOWEST = 0.5, 0.1, 0.001


@dataclass(frozen=True, slots=True)
class Elastic:
    """A request that follows the service's set-point, but never below `floor`."""

    floor: float


@dataclass(frozen=True, slots=True)
class Budget:
    """A request with the share of its tokens that may at most differ from AR decoding."""

    share: float

    def allows(self, disagreed: int, tokens: int) -> bool:
        """Whether one more token may differ, as the last of `tokens`."""
        return disagreed + 1 <= self.share * tokens


Quality = Elastic | Budget


class Thresholds:
    def __init__(self) -> None:
        self.set_point = 1.0
        # By budget: the share rounded to a thousandth, because clients name any share and no entry
        # is removed.
        self._log_of = defaultdict[float, float](lambda: math.log(_FIRST))

    def of(self, quality: Quality) -> float:
        """The threshold of a request's next step."""
        if isinstance(quality, Elastic):
            return max(quality.floor, self.set_point)
        return math.exp(self._log_of[round(quality.share, 3)])

    def observe(self, budget: Budget, tokens: int, disagreed: int) -> None:
        """Learn from a step's tokens: the threshold rises if too many of them differ.

        In the long run the share of tokens that differ approaches the budget.
        """
        key = round(budget.share, 3)
        moved = self._log_of[key] + _GAIN * (disagreed - budget.share * tokens)
        self._log_of[key] = min(0.0, max(math.log(_LOWEST), moved))
