"""Trees of drafts: each draft follows the last committed token or another draft.

Nodes are numbered: 0 is the last committed token, k the k-th draft, counted from 1. A tree is given
by the parent of each draft, which has a smaller number than the draft. A chain is [0, 1, 2, ...].
"""

from collections.abc import Sequence


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
