"""Which drafts and masks of a sequence are worth their rows, at a price of a row.

A step checks the first drafts of a sequence, and its outcome is how many of them are accepted.
Masks behind an outcome become the next step's drafts if that is the outcome, and nothing
otherwise: the next step then has none to check. So a doubtful draft is not only a row. Checked, it
may end the step at an outcome without masks; left out, the step ends before it, where masks are
sure to be of use.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Choice:
    """What a sequence's step has: the first of its drafts, and masks behind each outcome."""

    drafts: int
    masks: tuple[int, ...]  # by how many drafts are accepted
    value: float = field(default=0.0, compare=False)  # tokens that it brings beyond its price

    @property
    def rows(self) -> int:
        """Added to those of committed tokens."""
        return self.drafts + sum(self.masks)


class Prospects:
    """What masks promise and what rows cost, in tokens that the same time would bring elsewhere.

    A mask takes a row now and, if its outcome comes and its draft is likely enough, the row that
    checks it. With masks behind the next step's outcomes too, and so on, every step gains the same
    by them. Where drafts are checked without any, only every other step has drafts, and gains half:
    then they are still worth having behind nothing, but a doubtful draft before them is not.
    """

    def __init__(self, worth: Sequence[float], price: float, lasting: float = 1.0) -> None:
        """`worth` is, by depth, what a mask brings in the next step if its outcome comes, beyond
        the price of checking its draft; it falls. `lasting` is the share of what masks bring that
        steps have which check drafts."""
        self.price = price
        self._falling = [-value for value in worth]
        self._brought = list(accumulate(worth, initial=0.0))
        count = bisect_left(self._falling, -price)
        self.gain = self._brought[count] - price * count  # by masks of a sequence without drafts
        self._onward = self.gain * (lasting - 1) / 2

    def masks(self, likelihood: float, most: int) -> tuple[int, float]:
        """How many behind an outcome, and what they bring beyond their price."""
        price = self.price
        if likelihood <= price:
            return 0, 0.0
        count = bisect_left(self._falling, -price / likelihood, 0, most)
        gain = likelihood * (self._brought[count] + self._onward) - price * count
        return (count, gain) if gain > 0 else (0, 0.0)


def best_choice(
    accept: Sequence[float], rooms: Sequence[int], prospects: Prospects, groups: int | None = None
) -> Choice:
    """That which brings most beyond its price.

    `accept` are the probabilities that each draft is accepted if those before it are, `rooms` the
    most masks behind each outcome, one more than drafts. At most `groups` outcomes have masks,
    the last one always counted among them.
    """
    survival, gained, behind = 1.0, 0.0, 0.0
    own, most = prospects.masks(1.0, rooms[0])
    best = Choice(0, (own,), most)
    masks: list[int] = []  # behind the outcomes before the last
    gains: list[float] = []
    for index, probability in enumerate(accept):
        # The draft is a row, and what is left to the outcome before it is the draft's rejection.
        rejected = survival * (1 - probability)
        survival *= probability
        if survival <= prospects.price:
            break  # what is left is not worth a row, and what masks bring only falls
        gained += survival - prospects.price
        own, gain = prospects.masks(rejected, rooms[index])
        masks.append(own)
        gains.append(gain)
        behind += gain
        if groups is not None:
            behind -= _drop_one(groups - 1, masks, gains)
        own, gain = prospects.masks(survival, rooms[index + 1])
        if gained + behind + gain > most:
            most = gained + behind + gain
            best = Choice(index + 1, (*masks, own), most)
    return best


def _drop_one(groups: int, masks: list[int], gains: list[float]) -> float:
    """Of more outcomes with masks than groups the one that brings least loses its, which is
    returned; outcomes to come can only take more away."""
    places = [place for place, own in enumerate(masks) if own]
    if len(places) <= groups:
        return 0.0
    least = min(places, key=lambda place: gains[place])
    lost, masks[least], gains[least] = gains[least], 0, 0.0
    return lost
