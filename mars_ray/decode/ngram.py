"""Drafts without a model: the tokens that followed where the last ones stood before.

Known as prompt lookup (transformers' `prompt_lookup_num_tokens`) and as `ngram` in vLLM. Here each
sequence has an index, so a step costs no search through its text. How far such a draft is to be
believed depends on how many tokens match, on whether the masks say the same, and on the text:
`NgramStats` counts the first two over all sequences, `NgramIndex` what its own drafts were worth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mars_ray.core.tree import path_to

# A pair of tokens must match at least; of its earlier places so many are compared, latest first.
_LEAST_MATCH, _PLACES = 2, 8
_LONGEST_MATCH = 16  # longer ones count as this long
# Rates before anything is observed, by the length of the match, count for so many observations.
_PRIOR_WEIGHT = 4.0
_MOST_RATE = 0.99
# Weights that an observation keeps after each further one, of all sequences and of its own.
_DECAY, _OWN_DECAY = 0.99, 0.9
_OWN_WEIGHT = 2.0  # expected acceptances that a sequence is taken to have had as expected


@dataclass(frozen=True, slots=True)
class Match:
    """Why a draft was looked up: the number of tokens before it that match, and whether masks
    proposed it too, or only others in its place."""

    length: int
    masks: Literal["silent", "agree", "differ"]


class NgramIndex:
    """Where each pair of a sequence's tokens has stood."""

    __slots__ = ("_accepted", "_earlier", "_expected", "_latest")

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}  # the place behind the pair
        self._earlier = [0] * _LEAST_MATCH  # by place: the one before it behind the same pair
        self._expected = self._accepted = 0.0

    def drafts(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        """At most so many tokens that followed the longest match, and its length; nothing and 0 if
        the last pair is new. Call it with the same tokens and more."""
        latest, earlier = self._latest, self._earlier
        for place in range(len(earlier), len(tokens)):
            pair = tokens[place - 2], tokens[place - 1]
            earlier.append(latest.get(pair, 0))
            latest[pair] = place
        if len(tokens) < _LEAST_MATCH:
            return [], 0
        found, length = 0, 0
        place = latest.get((tokens[-2], tokens[-1]), 0)
        for _ in range(_PLACES):
            if not place or length == _LONGEST_MATCH:
                break
            own, most_own = _LEAST_MATCH, min(_LONGEST_MATCH, place)  # its pair matches
            while own < most_own and tokens[place - own - 1] == tokens[-own - 1]:
                own += 1
            if own > length:
                found, length = place, own
            place = earlier[place]
        drafts: list[int] = list(tokens[found : found + most]) if found else []
        while drafts and len(drafts) < most:
            drafts.append(drafts[len(drafts) - (len(tokens) - found)])  # the text goes in a circle
        return drafts, length

    @property
    def trust(self) -> float:
        """How often this sequence's drafts were accepted, over how often all sequences' are."""
        return (self._accepted + _OWN_WEIGHT) / (self._expected + _OWN_WEIGHT)

    def observe(self, rate: float, *, accepted: bool) -> None:
        """Learn from a draft that was checked; `rate` is what all sequences expected."""
        self._expected = self._expected * _OWN_DECAY + rate
        self._accepted = self._accepted * _OWN_DECAY + accepted


class NgramStats:
    """How often looked-up drafts were accepted lately."""

    def __init__(self) -> None:
        lengths = range(_LONGEST_MATCH + 1)
        prior = {
            "silent": [length / (length + 3) for length in lengths],
            "agree": [length / (length + 1) for length in lengths],
            "differ": [length / (length + 12) for length in lengths],
        }
        self._accepted = {key: [_PRIOR_WEIGHT * p for p in rates] for key, rates in prior.items()}
        self._checked = {key: [_PRIOR_WEIGHT for _ in lengths] for key in prior}

    def of(self, match: Match) -> float:
        """How likely such a draft is accepted if its parent is, over all sequences."""
        place = min(match.length, _LONGEST_MATCH)
        return self._accepted[match.masks][place] / self._checked[match.masks][place]

    def likely(self, match: Match, index: NgramIndex) -> float:
        """How likely such a draft of the index's sequence is accepted."""
        return min(_MOST_RATE, self.of(match) * index.trust)

    def observe(
        self,
        matches: Sequence[Match | None],
        outcome: int,
        parents: Sequence[int],
        index: NgramIndex,
    ) -> None:
        """Learn from a verification of a sequence's drafts that ended at a node (`core.tree`)."""
        reached = {0, *path_to(parents, outcome)}
        for node, (parent, match) in enumerate(zip(parents, matches, strict=True), start=1):
            if match and parent in reached:
                accepted = node in reached
                index.observe(self.of(match), accepted=accepted)
                place = min(match.length, _LONGEST_MATCH)
                counts = self._checked[match.masks], self._accepted[match.masks]
                for count, one in zip(counts, (1, accepted), strict=True):
                    count[place] = count[place] * _DECAY + one
