"""Trees of drafts, and which of a sequence's drafts, masks and outcomes are worth their rows.

Each draft follows the last committed token or another draft. Nodes are numbered: 0 is the last
committed token, k the k-th draft, counted from 1. A tree is given by each draft's parent, whose
number is smaller. A chain is [0, 1, 2, ...].

A step checks some drafts of a sequence; its outcome is the node where it ends. Masks behind that
outcome become the next step's drafts. Masks behind other nodes are lost, and an outcome without
masks leaves the next step without drafts to check. So a doubtful draft costs more than its row. If
it is checked, the step may end at an outcome without masks. If it is left out, the step ends before
it, where the masks are sure to be used.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate


def chain(drafts: int) -> list[int]:
    """Parents of drafts that follow one another."""
    return list(range(drafts))


def fan(branches: int, depth: int) -> list[int]:
    """Parents of chains of `depth` drafts that begin at node 0, numbered one after the other."""
    return [
        0 if level == 0 else branch * depth + level
        for branch in range(branches)
        for level in range(depth)
    ]


def first_chain(parents: Sequence[int]) -> int:
    """Number of leading drafts that form a chain."""
    return next((i for i, parent in enumerate(parents) if parent != i), len(parents))


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The drafts from the last committed token to a node, itself included."""
    path = []
    while node:
        path.append(node)
        node = parents[node - 1]
    return path[::-1]


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """The drafts that follow each node."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents, start=1):
        children[parent].append(node)
    return children


def depths_of(parents: Sequence[int]) -> list[int]:
    """Number of drafts on the path to each node."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def reaches_of(parents: Sequence[int], accept: Sequence[float]) -> list[float]:
    """How likely each node is reached; `accept` is the probability that each draft is accepted if
    its parent is."""
    reaches = [1.0]
    for parent, probability in zip(parents, accept, strict=True):
        reaches.append(reaches[parent] * probability)
    return reaches


def renumbered(parents: Sequence[int], nodes: Sequence[int]) -> list[int]:
    """Parents in the subtree of some nodes, given in rising order, each along with its parent."""
    number = {0: 0} | {node: place for place, node in enumerate(nodes, start=1)}
    return [number[parents[node - 1]] for node in nodes]


@dataclass(frozen=True, slots=True)
class Choice:
    """The rows chosen for a sequence in a step: some of its drafts, and masks behind outcomes."""

    drafts: int
    masks: tuple[int, ...]  # behind the last committed token, and behind each of these drafts
    value: float = field(default=0.0, compare=False)  # tokens gained, less its price
    nodes: tuple[int, ...] = ()  # the drafts' numbers (`core.tree`); by default they are the first

    def __post_init__(self) -> None:
        if not self.nodes:
            object.__setattr__(self, "nodes", tuple(range(1, self.drafts + 1)))

    @property
    def rows(self) -> int:
        """Number of rows, those of committed tokens not counted."""
        return self.drafts + sum(self.masks)


class Prospects:
    """Expected gain of masks and cost of rows, in tokens that the same time would yield elsewhere.

    A mask costs a row now and, if its outcome occurs and its draft is likely enough, the row that
    checks the draft. If every step has masks behind its outcomes, all steps gain the same. If steps
    that check drafts have no masks, only every other step has drafts, and the gain is halved: then
    masks still pay where there are no drafts, but a doubtful draft before them does not.
    """

    def __init__(
        self,
        worth: Sequence[float],
        price: float,
        lasting: float,
        mask_price: float,
    ) -> None:
        """`worth` is, by depth, the gain of a mask in the next step if its outcome occurs, less
        the price of checking its draft; it falls with depth. `lasting` is the share of the masks'
        gain that remains in steps that also check drafts. A draft costs `price`, a mask
        `mask_price`."""
        self.price, self._mask_price = price, mask_price
        self._falling = [-value for value in worth]
        self._brought = list(accumulate(worth, initial=0.0))
        count = bisect_left(self._falling, -mask_price)
        self.gain = self._brought[count] - mask_price * count  # in a sequence without drafts
        self._onward = self.gain * (lasting - 1) / 2

    def masks(self, likelihood: float, most: int) -> tuple[int, float]:
        """Number of masks worth their price behind an outcome, at most `most`, and their net gain
        in tokens."""
        price = self._mask_price
        if likelihood <= price:
            return 0, 0.0
        count = bisect_left(self._falling, -price / likelihood, 0, most)
        gain = likelihood * (self._brought[count] + self._onward) - price * count
        return (count, gain) if gain > 0 else (0, 0.0)


def best_choice(
    accept: Sequence[float],
    rooms: Sequence[int],
    prospects: Prospects,
    groups: int | None,
    parents: Sequence[int],
) -> Choice:
    """The choice with the largest net gain; it checks the drafts that are likeliest to be reached.

    `accept` is the probability that each draft is accepted if its parent is, `rooms` the most masks
    allowed behind each node (`core.tree`). At most `groups` outcomes have masks, always including
    that of the last draft; with None, any number.
    """
    reached = reaches_of(parents, accept)
    # A draft not worth a row is left out, and so is what follows it; the gain of masks only falls.
    order = [node for node in range(1, len(reached)) if reached[node] > prospects.price]
    order.sort(key=lambda node: -reached[node])  # no draft before its parent
    ending = [1.0] + [0.0] * len(accept)  # how likely the step ends at each node
    masks = {0: prospects.masks(1.0, rooms[0])}
    checked, most, count, kept = 0.0, masks[0][1], 0, dict(masks)
    for index, node in enumerate(order):
        # The parent now ends the step only if none of the drafts behind it is accepted.
        parent = parents[node - 1]
        checked += reached[node] - prospects.price
        ending[node] = reached[node]
        ending[parent] -= reached[node]
        masks[parent] = prospects.masks(ending[parent], rooms[parent])
        masks[node] = prospects.masks(ending[node], rooms[node])
        own = masks if groups is None else _fewer(masks, node, groups)
        value = checked + sum(gain for _, gain in own.values())
        if value > most:
            most, count, kept = value, index + 1, dict(own)
    nodes = sorted(order[:count])
    return Choice(count, tuple(kept[node][0] for node in (0, *nodes)), most, tuple(nodes))


def _fewer(
    masks: dict[int, tuple[int, float]], last: int, groups: int
) -> dict[int, tuple[int, float]]:
    """The masks of at most `groups` outcomes: the last one, and the others with the most gain."""
    others = [node for node, (own, _) in masks.items() if own and node != last]
    others.sort(key=lambda node: masks[node][1])
    return masks | dict.fromkeys(others[: max(0, len(others) + 1 - groups)], (0, 0.0))


# 1 minus probabilities that sum to 1 counts as 0 within this rounding error.
_ROUNDING = 1e-6


def likeliest_outcomes(
    probabilities: Sequence[float], count: int, parents: Sequence[int]
) -> list[int]:
    """At most `count` of the nodes where the step may end, the likeliest first.

    `probabilities` says how likely each of the K drafts is accepted if its parent is. Ties go to
    the larger node.
    """
    ending = [1.0] * (len(parents) + 1)  # how likely no child of a node is accepted
    for parent, probability in zip(parents, probabilities, strict=True):
        ending[parent] -= probability
    reached = reaches_of(parents, probabilities)
    likelihoods = [
        (reach * own if own > _ROUNDING else 0.0, node)
        for node, (reach, own) in enumerate(zip(reached, ending, strict=True))
    ]
    return [node for _, node in sorted(likelihoods, reverse=True)[:count]]
