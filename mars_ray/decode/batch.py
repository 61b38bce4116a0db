"""One forward over the rows of many sequences, laid end to end.

Only attention knows where a sequence ends, so a prompt's chunk and single decoding rows share all
matrix products, and none is padded.

Shape suffixes: N rows of a forward, S sequences, B sequences of a group, Q rows of the longest, M
pages of the longest table, C its places, R rows of a key head (Q times the query heads of one).
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mars_ray.decode.kv_cache import Group, PagedCache, PagedStep
from mars_ray.decode.reading import read
from mars_ray.decode.runner import Runner
from mars_ray.decode.scheduler import Work
from mars_ray.decode.strategies.base import Rows

# Sequences with at most so many rows attend together. Longer ones do so with those of up to twice
# as many rows: they would pad the others.
_NARROW = 32


@torch.inference_mode()
def forward(
    runner: Runner, cache: PagedCache, work: Several[Work], mask_token_id: int
) -> list[Rows | None]:
    """Forward [pending | drafts | masks] of every sequence; the rows of those that have a plan."""
    tables = _Tables.of(work, cache.page_size)
    position_N = torch.from_numpy(_positions(work, tables))
    step = _step(work, tables, cache, runner)
    ids_N = torch.tensor(list(chain.from_iterable(_tokens(w, mask_token_id) for w in work)))
    hidden_NH = runner.hidden_states(ids_N.to(runner.device), position_N.to(runner.device), step)
    if not any(item.plan for item in work):
        return [None] * len(work)
    rows = iter(read(runner, hidden_NH, work, position_N, mask_token_id))
    return [next(rows) if item.plan else None for item in work]


@dataclass(frozen=True, slots=True)
class _Tables:
    """Where each sequence's rows lie: among the forward's, and in its table of pages."""

    width_S: np.ndarray  # rows
    first_S: np.ndarray  # the first row among the forward's
    start_S: np.ndarray  # its place in the sequence
    page_SM: np.ndarray
    owner_N: np.ndarray  # the sequence of a row
    index_N: np.ndarray  # the place of a row in its sequence

    @classmethod
    def of(cls, work: Several[Work], page_size: int) -> "_Tables":
        width_S = np.array([item.rows for item in work])
        start_S = np.array([item.sequence.cached for item in work])
        first_S = width_S.cumsum() - width_S
        owner_N = np.arange(len(work)).repeat(width_S)
        index_N = np.arange(width_S.sum()) + (start_S - first_S)[owner_N]
        page_SM = np.zeros((len(work), -(-int((start_S + width_S).max()) // page_size)), np.int64)
        for row, item in zip(page_SM, work, strict=True):
            pages = item.sequence.pages[: len(row)]
            row[: len(pages)] = pages
        return cls(width_S, first_S, start_S, page_SM, owner_N, index_N)

    def places(self, page_size: int) -> np.ndarray:
        """Where each row's keys and values go in the pool."""
        page_N = self.page_SM[self.owner_N, self.index_N // page_size]
        return page_N * page_size + self.index_N % page_size


def _tokens(item: Work, mask_token_id: int) -> list[int]:
    sequence, plan = item.sequence, item.plan
    real = sequence.tokens[sequence.cached : sequence.cached + item.count]
    if plan is None:
        return real
    return [*real, *plan.drafts, *([mask_token_id] * (plan.rows - len(plan.drafts)))]


def _positions(work: Several[Work], tables: _Tables) -> np.ndarray:
    """A row's position is its place in the sequence, unless a group of masks stands elsewhere."""
    position_N = tables.index_N.copy()
    for item, first, start in zip(work, tables.first_S, tables.start_S, strict=True):
        if item.plan and not item.plan.is_causal:
            row = first + item.count + len(item.plan.drafts)
            for group in item.plan.groups:
                stands = start + item.count + group.after
                position_N[row : row + group.masks] = np.arange(stands, stands + group.masks)
                row += group.masks
    return position_N


def _step(work: Several[Work], tables: _Tables, cache: PagedCache, runner: Runner) -> PagedStep:
    members = _members(tables.width_S)
    padded = [_padded_rows(tables, member_B) for member_B in members]
    is_plain = len(padded) == 1 and bool(padded[0][1].all())
    groups = []
    for member_B, (row_BQ, _) in zip(members, padded, strict=True):
        own = [work[index] for index in member_B]
        start_B = tables.start_S[member_B]
        end = int((start_B + tables.width_S[member_B]).max())
        page_BM = tables.page_SM[member_B, : -(-end // cache.page_size)]
        places = page_BM.shape[1] * cache.page_size
        groups.append(
            Group(
                len(own),
                None if is_plain else _tensor(row_BQ.ravel(), runner),
                _tensor(page_BM.ravel(), runner),
                _bias(own, start_B, row_BQ.shape[1], places, cache, runner),
            )
        )
    place_N = _tensor(tables.places(cache.page_size), runner)
    return PagedStep(cache, place_N, groups, None if is_plain else _back(padded, runner))


def _members(width_S: np.ndarray) -> list[np.ndarray]:
    """Which sequences attend together."""
    if width_S.max() <= _NARROW:
        return [np.arange(len(width_S))]
    size_S = np.ceil(np.log2(width_S.clip(min=_NARROW)))
    return [np.flatnonzero(size_S == size) for size in np.unique(size_S)]


def _padded_rows(tables: _Tables, member_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A group's rows among the forward's, (B, Q), and which are no padding."""
    width_B = tables.width_S[member_B]
    offset_Q = np.arange(width_B.max())
    real_BQ = offset_Q < width_B[:, None]
    # Padding repeats a sequence's first row.
    return tables.first_S[member_B][:, None] + offset_Q * real_BQ, real_BQ


def _back(padded: list[tuple[np.ndarray, np.ndarray]], runner: Runner) -> Tensor:
    """Where each of the forward's rows is among those of all groups."""
    row_X = np.concatenate([row_BQ.ravel() for row_BQ, _ in padded])
    real_X = np.concatenate([real_BQ.ravel() for _, real_BQ in padded])
    back_N = np.empty(real_X.sum(), np.int64)
    back_N[row_X[real_X]] = np.flatnonzero(real_X)
    return _tensor(back_N, runner)


def _bias(
    work: Several[Work],
    start_B: np.ndarray,
    width: int,
    places: int,
    cache: PagedCache,
    runner: Runner,
) -> Tensor:
    """What attention adds to the scores of a key head's rows, (B, 1, R, C)."""
    shared = cache.shared_heads
    index_BR = start_B[:, None] + np.arange(width).repeat(shared)
    # Padding may lie behind all places.
    index_BR = index_BR.clip(max=places - 1)
    bias_XC = cache.causal(_tensor(index_BR.ravel(), runner), places)
    bias_BRC = bias_XC.view(len(work), -1, places)
    for index, (item, start) in enumerate(zip(work, start_B.tolist(), strict=True)):
        if item.plan and not item.plan.is_causal:
            _separate(bias_BRC[index], item, start, shared)
    return bias_BRC[:, None]


def _tensor(array: np.ndarray, runner: Runner) -> Tensor:
    return torch.from_numpy(array).to(runner.device)


def _separate(bias_RC: Tensor, item: Work, start: int, shared: int) -> None:
    """Hide from each group of masks the drafts behind it and the groups before it."""
    assert item.plan
    row = item.count + len(item.plan.drafts)
    for group in item.plan.groups:
        seen = start + item.count + group.after
        bias_RC[row * shared : (row + group.masks) * shared, seen : start + row] = -torch.inf
        row += group.masks
