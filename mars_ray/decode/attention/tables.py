"""The places of a forward's rows, in their sequences and in the pool, and what each row sees.

The rows of all real tokens come first, sequence by sequence, followed by those of all masks:

    [ pending and drafts of a | of b | ... | masks of a | of b | ... ]

Shape suffixes: N rows of a forward, S sequences, M pages of the longest table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mars_ray.decode.scheduler import Work


@dataclass(frozen=True, slots=True)
class Apart:
    """A draft, or a group of masks, that does not see everything before it."""

    sequence: int
    row: int  # the first of them, among the sequence's rows
    rows: int
    seen: int  # they see each other, this many of the sequence's first places,
    others: int  # and of the places from there on the j-th if bit j is set


@dataclass(frozen=True, slots=True)
class Tables:
    """The places of each sequence's rows: among the forward's, and in its table of pages.

    In its table they lie in the order of the plan, [pending | drafts | masks].
    """

    real_S: np.ndarray  # rows of real tokens
    first_S: np.ndarray  # the first of these among the forward's
    masks_S: np.ndarray  # rows of masks
    first_mask_S: np.ndarray
    start_S: np.ndarray  # the place of a sequence's first row
    page_SM: np.ndarray
    owner_N: np.ndarray  # the sequence of a row
    index_N: np.ndarray  # the place of a row in its sequence
    apart: list[Apart]

    @classmethod
    def of(cls, work: Sequence[Work], page_size: int) -> "Tables":
        """The tables of a step's sequences, in their order."""
        masks_S = np.array([item.plan.masks if item.plan else 0 for item in work])
        width_S = np.array([item.rows for item in work])
        real_S = width_S - masks_S
        start_S = np.array([item.sequence.cached for item in work])
        first_S = real_S.cumsum() - real_S
        first_mask_S = real_S.sum() + masks_S.cumsum() - masks_S
        owner_S = np.arange(len(work))
        owner_N = np.concatenate([owner_S.repeat(real_S), owner_S.repeat(masks_S)])
        behind_S = np.concatenate([start_S - first_S, start_S + real_S - first_mask_S])
        index_N = np.arange(len(owner_N))
        index_N += behind_S.repeat(np.concatenate([real_S, masks_S]))
        page_SM = np.zeros((len(work), -(-int((start_S + width_S).max()) // page_size)), np.int64)
        for row, item in zip(page_SM, work, strict=True):
            pages = item.sequence.pages[: len(row)]
            row[: len(pages)] = pages
        return cls(
            real_S,
            first_S,
            masks_S,
            first_mask_S,
            start_S,
            page_SM,
            owner_N,
            index_N,
            list(_apart(work)),
        )

    @property
    def width_S(self) -> np.ndarray:
        """Rows of each sequence, of both kinds."""
        return self.real_S + self.masks_S

    @property
    def order_N(self) -> np.ndarray:
        """The forward's rows sequence by sequence, in the order of their places."""
        return np.argsort(self.owner_N, kind="stable")

    @property
    def masks(self) -> int:
        """Number of masks, which are the forward's last rows."""
        return int(self.masks_S.sum())

    def places(self, page_size: int) -> np.ndarray:
        """The place of each row's keys and values in the pool."""
        page_N = self.page_SM[self.owner_N, self.index_N // page_size]
        return page_N * page_size + self.index_N % page_size

    def positions(self) -> np.ndarray:
        """Each row's position: its place in the sequence, or if it does not see all before it, the
        number of places that it sees."""
        position_N = self.index_N.copy()
        for group in self.apart:
            row, first = self._row(group), group.seen + group.others.bit_count()
            position_N[row : row + group.rows] = np.arange(first, first + group.rows)
        return position_N

    def sight(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each row's three numbers: it sees the places before the first, those from the second to
        its own, and the j-th place from the first on if bit j of the third is set."""
        clean_N, begin_N, bits_N = (np.zeros_like(self.index_N) for _ in range(3))
        for group in self.apart:
            row = self._row(group)
            rows = slice(row, row + group.rows)
            clean_N[rows], begin_N[rows], bits_N[rows] = group.seen, self.index_N[row], group.others
        return clean_N, begin_N, bits_N

    def rows_of(self, member_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Indices of some sequences' rows among the forward's, (B, Q), in the order of their places
        and padded with a sequence's first row; and which of them are not padding."""
        offset_Q = np.arange(self.width_S[member_B].max())
        real_B1, first_B1 = self.real_S[member_B][:, None], self.first_S[member_B][:, None]
        mask_BQ = self.first_mask_S[member_B][:, None] + offset_Q - real_B1
        row_BQ = np.where(offset_Q < real_B1, first_B1 + offset_Q, mask_BQ)
        is_row_BQ = offset_Q < self.width_S[member_B][:, None]
        return np.where(is_row_BQ, row_BQ, first_B1), is_row_BQ

    def _row(self, group: Apart) -> int:
        """Index of a group's first row among the forward's rows."""
        masks_before = group.row - int(self.real_S[group.sequence])
        if masks_before < 0:
            return int(self.first_S[group.sequence]) + group.row
        return int(self.first_mask_S[group.sequence]) + masks_before


def _apart(work: Sequence[Work]) -> Iterator[Apart]:
    for index, item in enumerate(work):
        plan = item.plan
        if plan is None or plan.is_causal:
            continue
        first = item.sequence.cached + item.count  # the place of the first draft
        # `seen` and `others` of rows behind each node.
        sights = [(first + node, 0) for node in range(len(plan.drafts) + 1)]
        for node in range(0 if plan.is_chain else len(sights)):
            bits = sum(1 << (draft - 1) for draft in plan.path(node))
            if bits != (1 << node) - 1:
                sights[node] = first, bits
        for draft, parent in enumerate(plan.parents):
            if parent != draft or sights[parent][1]:
                yield Apart(index, item.count + draft, 1, *sights[parent])
        row = item.count + len(plan.drafts)
        for group in plan.groups:
            yield Apart(index, row, group.masks, *sights[group.after])
            row += group.masks
