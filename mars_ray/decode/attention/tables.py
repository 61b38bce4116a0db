"""Where the rows of a forward lie, in their sequences and in the pool, and what each may look at.

Shape suffixes: N rows of a forward, S sequences, M pages of the longest table.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np

from mars_ray.decode.scheduler import Work


@dataclass(frozen=True, slots=True)
class Apart:
    """Masks that do not see all that stands before them."""

    sequence: int
    row: int  # the first of them, among the sequence's rows
    masks: int
    seen: int  # of the sequence's places, the first so many: what they see beside each other


@dataclass(frozen=True, slots=True)
class Tables:
    """Where each sequence's rows lie: among the forward's, and in its table of pages."""

    width_S: np.ndarray  # rows
    first_S: np.ndarray  # the first row among the forward's
    start_S: np.ndarray  # its place in the sequence
    page_SM: np.ndarray
    owner_N: np.ndarray  # the sequence of a row
    index_N: np.ndarray  # the place of a row in its sequence
    apart: list[Apart]

    @classmethod
    def of(cls, work: Several[Work], page_size: int) -> "Tables":
        """For rows that lie end to end in the order of the sequences."""
        width_S = np.array([item.rows for item in work])
        start_S = np.array([item.sequence.cached for item in work])
        first_S = width_S.cumsum() - width_S
        owner_N = np.arange(len(work)).repeat(width_S)
        index_N = np.arange(width_S.sum()) + (start_S - first_S)[owner_N]
        page_SM = np.zeros((len(work), -(-int((start_S + width_S).max()) // page_size)), np.int64)
        for row, item in zip(page_SM, work, strict=True):
            pages = item.sequence.pages[: len(row)]
            row[: len(pages)] = pages
        return cls(width_S, first_S, start_S, page_SM, owner_N, index_N, list(_apart(work)))

    def places(self, page_size: int) -> np.ndarray:
        """Where each row's keys and values go in the pool."""
        page_N = self.page_SM[self.owner_N, self.index_N // page_size]
        return page_N * page_size + self.index_N % page_size

    def positions(self) -> np.ndarray:
        """A row's position is its place in the sequence, unless its masks stand elsewhere."""
        position_N = self.index_N.copy()
        for group in self.apart:
            row = self.first_S[group.sequence] + group.row
            position_N[row : row + group.masks] = np.arange(group.seen, group.seen + group.masks)
        return position_N

    def sight(self) -> tuple[np.ndarray, np.ndarray]:
        """A row sees the places before the first number, and those from the second to its own."""
        clean_N, begin_N = np.zeros_like(self.index_N), np.zeros_like(self.index_N)
        for group in self.apart:
            row = self.first_S[group.sequence] + group.row
            clean_N[row : row + group.masks] = group.seen
            begin_N[row : row + group.masks] = self.index_N[row]
        return clean_N, begin_N


def _apart(work: Several[Work]) -> Iterator[Apart]:
    for index, item in enumerate(work):
        if item.plan and not item.plan.is_causal:
            row = item.count + len(item.plan.drafts)
            for group in item.plan.groups:
                seen = item.sequence.cached + item.count + group.after
                yield Apart(index, row, group.masks, seen)
                row += group.masks
