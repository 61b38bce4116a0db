"""What is known of drafts that were made lately: how likely they are accepted, and what for.

A draft is judged by its confidence, and a mask by the drafts that masks of its depth became.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

import numpy as np

from mars_ray.core.drafting import Choice, Prospects

# Drafts between two of these confidences are counted together.
_CONFIDENCES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_MIDDLES = np.array([(low + high) / 2 for low, high in pairwise((0.0, *_CONFIDENCES, 1.0))])
# A depth's rate before anything was observed, and how many observations that counts for.
_PRIOR_RATE, _PRIOR_WEIGHT = 0.9, 4.0
# What an observation still counts for after another one.
_DECAY = 0.99


class Acceptance:
    """Of greedy drafts, or of sampled ones."""

    def __init__(self, depth: int) -> None:
        self._accepted = (_MIDDLES * _PRIOR_WEIGHT).tolist()
        self._checked = [_PRIOR_WEIGHT] * len(_MIDDLES)
        # By depth, how many drafts were how likely to be reached and accepted.
        self._made = np.zeros((depth, len(_MIDDLES)))
        for index in range(depth):
            place = bisect_right(_CONFIDENCES, _PRIOR_RATE ** (index + 1))
            self._made[index, place] = _PRIOR_WEIGHT
        # Of what masks bring to a sequence without drafts, what they bring to one with drafts.
        self.lasting = 1.0

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """One verification: the drafts behind the first rejection tell nothing."""
        for index, confidence in enumerate(confidences[: accepted + 1]):
            place = bisect_right(_CONFIDENCES, confidence)
            self._checked[place] = self._checked[place] * _DECAY + 1
            self._accepted[place] = self._accepted[place] * _DECAY + (index < accepted)

    def of(self, confidences: Sequence[float]) -> list[float]:
        """How likely each of these drafts is accepted if those before it are."""
        places = [bisect_right(_CONFIDENCES, confidence) for confidence in confidences]
        return [self._accepted[place] / self._checked[place] for place in places]

    def observe_drafts(self, accept: Sequence[float], choice: Choice, prospects: Prospects) -> None:
        """A sequence's new drafts: how likely each is accepted, and what is made of them."""
        survivals = list(accumulate(accept, mul))
        alone = sum(max(0.0, survival - prospects.price) for survival in survivals)
        if prospects.gain > 0:
            lasting = (choice.value - alone) / prospects.gain
            self.lasting += (1 - _DECAY) * (lasting - self.lasting)
        places = [bisect_right(_CONFIDENCES, survival) for survival in survivals[: len(self._made)]]
        self._made[: len(places)] *= _DECAY
        self._made[np.arange(len(places)), places] += 1

    def worth(self, price: float) -> list[float]:
        """By depth, the tokens that a mask brings in the next step if its outcome comes, beyond the
        price of checking its draft: only a draft that is worth its row is checked."""
        beyond = self._made @ np.maximum(_MIDDLES - price, 0) / self._made.sum(axis=1)
        return list(accumulate(beyond.tolist(), min))
