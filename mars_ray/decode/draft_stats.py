"""Statistics of recent drafts: how likely drafts are accepted, and what masks are worth.

A draft is judged by its confidence, a mask by the drafts that masks of its depth became.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from mars_ray.core.draft_choice import Choice, Prospects
from mars_ray.core.tree import chain, depths_of, path_to, reaches_of
from mars_ray.decode.ngram import Match

# Drafts between two of these confidences are counted together.
_CONFIDENCES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_MIDDLES = np.array([(low + high) / 2 for low, high in pairwise((0.0, *_CONFIDENCES, 1.0))])
# A depth's rate before anything is observed, and the number of observations it counts for.
_PRIOR_RATE, _PRIOR_WEIGHT = 0.9, 4.0
# Weight that an observation keeps after each further one.
_DECAY = 0.99


class DraftStats:
    """Statistics of greedy drafts, or of sampled ones."""

    def __init__(self, depth: int) -> None:
        self._accepted = (_MIDDLES * _PRIOR_WEIGHT).tolist()
        self._checked = [_PRIOR_WEIGHT] * len(_MIDDLES)
        # By depth, counts of drafts by their probability of being reached and accepted; a mask
        # makes a draft in every branch.
        self._made = np.zeros((depth, len(_MIDDLES)))
        self._steps = np.full((depth, 1), _PRIOR_WEIGHT)  # steps with drafts of that depth
        for index in range(depth):
            place = bisect_right(_CONFIDENCES, _PRIOR_RATE ** (index + 1))
            self._made[index, place] = _PRIOR_WEIGHT
        # The gain of masks in a sequence with drafts, as a share of that in one without.
        self.lasting = 1.0

    def observe(
        self, confidences: Sequence[float], outcome: int, parents: Sequence[int] | None = None
    ) -> None:
        """Learn from a verification that ended at a node; the drafts are a chain unless parents are
        given. Drafts behind rejected ones tell nothing, nor those of confidence 0, which no mask
        proposed."""
        parents = chain(len(confidences)) if parents is None else parents
        reached = {0, *path_to(parents, outcome)}
        for node, (parent, confidence) in enumerate(zip(parents, confidences, strict=True), 1):
            if confidence and parent in reached:
                place = bisect_right(_CONFIDENCES, confidence)
                self._checked[place] = self._checked[place] * _DECAY + 1
                self._accepted[place] = self._accepted[place] * _DECAY + (node in reached)

    def of(self, confidences: Sequence[float]) -> list[float]:
        """How likely each of these drafts is accepted if its parent is."""
        places = [bisect_right(_CONFIDENCES, confidence) for confidence in confidences]
        return [self._accepted[place] / self._checked[place] for place in places]

    def observe_drafts(
        self,
        accept: Sequence[float],
        choice: Choice,
        prospects: Prospects,
        parents: Sequence[int] | None = None,
        matches: Sequence[Match | None] | None = None,
    ) -> None:
        """Learn from a sequence's new drafts, a chain unless parents are given: from how likely
        each is accepted, and from the choice made of them. Masks have not brought what was looked
        up, or would have been: it has a match."""
        parents = chain(len(accept)) if parents is None else parents
        survivals, depths = reaches_of(parents, accept)[1:], depths_of(parents)[1:]
        alone = sum(max(0.0, survival - prospects.price) for survival in survivals)
        if prospects.gain > 0:
            lasting = (choice.value - alone) / prospects.gain
            self.lasting += (1 - _DECAY) * (lasting - self.lasting)
        found = matches or [None] * len(depths)
        made = [
            (depth, survival)
            for depth, survival, match in zip(depths, survivals, found, strict=True)
            if not match
        ]
        seen = min(max(depths, default=0), len(self._made))
        self._made[:seen] *= _DECAY
        self._steps[:seen] = self._steps[:seen] * _DECAY + 1
        for depth, survival in made:
            if depth <= seen:
                self._made[depth - 1, bisect_right(_CONFIDENCES, survival)] += 1

    def worth(self, price: float) -> list[float]:
        """Tokens, by depth, that a mask gains in the next step if its outcome occurs, less the
        price of checking its drafts; only a draft that is worth its row is checked."""
        beyond = self._made @ np.maximum(_MIDDLES - price, 0) / self._steps[:, 0]
        return list(accumulate(beyond.tolist(), min))
