"""Attention by torch's own operations: for any device, any head size and any number of rows.

Shape suffixes: N rows of a forward, B sequences of a group, Q rows of the longest of them, X the
group's rows with padding, M pages of the longest table, C its places, H key-value heads, G query
heads of each, T all query heads, R rows of a key head (Q * G), D head size, Z hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mars_ray.config.modes import MOST_DRAFTS
from mars_ray.core.draft_head import candidate_logits
from mars_ray.decode.adapter import FusedAdapter, Last
from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.fused_model import FusedModel, Turn
from mars_ray.decode.kv_cache import PagedCache
from mars_ray.decode.logits import Block, best, sample, upload

# Sequences with at most this many rows attend together. Longer ones attend with those of up to
# twice as many rows, since they would pad the others too much.
_NARROW = 32


class DenseBackend:
    """Pads each group of sequences to a rectangle, with a bias for which row sees which place."""

    name = "dense"  # as in `attention_backend`
    instructions: str | None = None  # the instruction set of a compiled step

    def __init__(self, runner: FusedModel, cache: PagedCache) -> None:
        self.runner, self.cache = runner, cache
        self.device, self.dtype = runner.device, runner.dtype
        self.threads = torch.get_num_threads()
        self._hidden_NZ = torch.empty(0)

    @property
    def adapter(self) -> FusedAdapter | None:
        return self.runner.adapter

    @property
    def seconds(self) -> float:
        """Time spent in the model so far; on a GPU, in launching it and waiting for its results."""
        return self.runner.seconds

    def hidden(self, rows: Sequence[int]) -> Tensor:
        """Last hidden states of some rows of the last forward, (P, Z)."""
        if len(rows) == len(self._hidden_NZ):
            return self._hidden_NZ  # all of them, in their order
        return self._hidden_NZ.index_select(0, upload(torch.tensor(rows), self.device))

    def logits(self, rows: Sequence[int]) -> Tensor:
        """Logits of some rows of the last forward, float32 (P, V)."""
        return self.runner.logits(self.hidden(rows))

    def embed(self, ids_X: Tensor) -> Tensor:
        """Embeddings of tokens, (X, Z)."""
        return self.runner.embed(ids_X)

    def candidate_logits(self, hidden_XH: Tensor, candidate_XC: Tensor) -> Tensor:
        """Logits of each row's candidates only, float32 (X, C)."""
        return candidate_logits(hidden_XH, self.runner.vocabulary_VH, candidate_XC)

    def choose(
        self,
        logits_PV: Tensor,
        blocks: Sequence[Block],
        position_P: np.ndarray,
        draft_P: np.ndarray,
        parent_P: np.ndarray,
    ) -> tuple[Tensor, Tensor]:
        """Each row's token, NOT_A_NUMBER where there is none, and each draft's probability relative
        to that of the token of its parent's row. Logits may be overwritten; `position_P` holds the
        predicted tokens' positions."""
        sample(logits_PV, blocks, position_P)
        return best(logits_PV, draft_P, parent_P)

    def warm_up(self) -> None:
        """Do nothing: the first step is not slow here."""

    def set_adapter(self, adapter: FusedAdapter | None) -> None:
        """Set the adapter for masks from the next forward on."""
        self.runner.adapter = adapter

    def forward(self, tables: Tables, ids_N: np.ndarray, position_N: np.ndarray) -> None:
        """Run the rows through the model."""
        ids, position = _tensor(ids_N, self.runner), _tensor(position_N, self.runner)
        step = _step(tables, self.cache, self.runner)
        masks = Last(len(ids) - tables.masks) if tables.masks else None
        self._hidden_NZ = self.runner.hidden_states(ids, position, step, masks)


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences whose rows attend together, padded to the longest.

    `row_X` holds B * Q indices into the forward's rows; it is None if these are all rows in order.
    """

    batch: int
    row_X: Tensor | None
    page_X: Tensor  # B * M
    bias_B1RC: Tensor  # 0 where a row may attend, -inf elsewhere


@dataclass(frozen=True, slots=True)
class DenseAttention:
    """The places where one forward's rows store and find keys and values.

    `back_N` is each row's index among the padded rows of all groups, laid end to end; it is None if
    that order is the forward's own.
    """

    cache: PagedCache
    place_N: Tensor
    groups: list[Group]
    back_N: Tensor | None

    def __call__(self, layer: int, qkv_NTD: Tensor, turn: Turn, scale: float) -> Tensor:
        """Rotate queries and keys, store keys and values, and attend: (N, query heads * D)."""
        pages, cache = self.cache.pages[layer], self.cache.layers[layer]
        _, _, heads, size = cache.shape
        turned_NTD, (cos_N1D, sin_N1D) = qkv_NTD[:, :-heads], turn
        swapped_NTD = turned_NTD.roll(turned_NTD.shape[-1] // 2, dims=-1)
        turned_NTD.mul_(cos_N1D).addcmul_(swapped_NTD, sin_N1D)
        queries = qkv_NTD.shape[1] - 2 * heads
        kv_N2HD = qkv_NTD[:, queries:].view(-1, 2, heads, size)
        # Hidden places are multiplied by 0, and 0 * NaN is NaN.
        cache.index_copy_(0, self.place_N, kv_N2HD.nan_to_num(0.0, 0.0, 0.0))
        query_NTD = qkv_NTD[:, :queries]
        parts = [_attend_group(pages, heads, group, query_NTD, scale) for group in self.groups]
        out_XV = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out_XV if self.back_N is None else out_XV.index_select(0, self.back_N)


def _attend_group(
    pages: Tensor, heads: int, group: Group, query_NTD: Tensor, scale: float
) -> Tensor:
    """Attention of the group's rows, padding included, (B * Q, T * D)."""
    query_XTD = query_NTD if group.row_X is None else query_NTD.index_select(0, group.row_X)
    rows, queries, size = query_XTD.shape
    batch, shared = group.batch, queries // heads
    width = rows // batch
    kv_BC2HD = pages.index_select(0, group.page_X).view(batch, -1, 2, heads, size)
    key_BHCD, value_BHCD = kv_BC2HD.permute(2, 0, 3, 1, 4).unbind(0)
    # The query heads that share a key head become its rows, so that no key has to be repeated.
    query_BHQGD = query_XTD.view(batch, width, heads, shared, size).transpose(1, 2)
    out_BHRD = scaled_dot_product_attention(
        query_BHQGD.reshape(batch, heads, width * shared, size),
        key_BHCD,
        value_BHCD,
        attn_mask=group.bias_B1RC,
        scale=scale,
    )
    out_BQHGD = out_BHRD.view(batch, heads, width, shared, size).transpose(1, 2)
    return out_BQHGD.reshape(rows, queries * size)


def _step(tables: Tables, cache: PagedCache, runner: FusedModel) -> DenseAttention:
    width_S, rows = tables.width_S, len(tables.owner_N)
    members = [np.arange(len(width_S))]
    if width_S.max() > _NARROW:
        size_S = np.ceil(np.log2(width_S.clip(min=_NARROW)))
        members = [np.flatnonzero(size_S == size) for size in np.unique(size_S)]
    padded = [tables.rows_of(member_B) for member_B in members]
    row_X = np.concatenate([row_BQ.ravel() for row_BQ, _ in padded])
    # The forward's rows in their order, without padding.
    is_plain = len(members) == 1 and row_X.size == rows
    is_plain = is_plain and bool((row_X == np.arange(rows)).all())
    back_N = None
    if not is_plain:
        real_X = np.concatenate([real_BQ.ravel() for _, real_BQ in padded])
        back_N = np.empty(rows, np.int64)
        back_N[row_X[real_X]] = np.flatnonzero(real_X)
        back_N = _tensor(back_N, runner)
    groups = []
    for member_B, (row_BQ, _) in zip(members, padded, strict=True):
        end = int((tables.start_S[member_B] + width_S[member_B]).max())
        page_BM = tables.page_SM[member_B, : -(-end // cache.page_size)]
        places = page_BM.shape[1] * cache.page_size
        groups.append(
            Group(
                len(member_B),
                None if is_plain else _tensor(row_BQ.ravel(), runner),
                _tensor(page_BM.ravel(), runner),
                _bias(tables, member_B, row_BQ, places, cache, runner),
            )
        )
    place_N = _tensor(tables.places(cache.page_size), runner)
    return DenseAttention(cache, place_N, groups, back_N)


def _bias(
    tables: Tables,
    member_B: np.ndarray,
    row_BQ: np.ndarray,
    places: int,
    cache: PagedCache,
    runner: FusedModel,
) -> Tensor:
    """The bias that attention adds to the scores of a key head's rows, (B, 1, R, C)."""
    shared, width = cache.shared_heads, row_BQ.shape[1]
    index_BR = tables.start_S[member_B][:, None] + np.arange(width).repeat(shared)
    # Padding may lie behind all places.
    index_BR = index_BR.clip(max=places - 1)
    bias_XC = cache.causal(_tensor(index_BR.ravel(), runner), places)
    bias_BRC = bias_XC.view(len(member_B), -1, places)
    if {group.sequence for group in tables.apart}.intersection(member_B.tolist()):
        hidden = _hidden(tables, member_B, row_BQ)
        member_X, row_X, place_X = (_tensor(each, runner) for each in hidden)
        bias_BQGC = bias_BRC.view(len(member_B), width, shared, places)
        bias_BQGC[member_X, row_X, :, place_X] = -torch.inf
    return bias_BRC[:, None]


def _hidden(
    tables: Tables, member_B: np.ndarray, row_BQ: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of a row that stands apart and an earlier place that it does not see: the member, its
    row and the place of each pair."""
    clean_BQ1, begin_BQ1, bits_BQ1 = (column_N[row_BQ][..., None] for column_N in tables.sight())
    start_B11 = tables.start_S[member_B][:, None, None]
    place_BQT = start_B11 + np.arange(row_BQ.shape[1])
    bit_BQT = (place_BQT - clean_BQ1).clip(0, MOST_DRAFTS)
    is_other_BQT = (bits_BQ1 >> bit_BQT) & 1 > 0
    hidden_BQT = (place_BQT >= clean_BQ1) & (place_BQT < begin_BQ1) & ~is_other_BQT
    member_X, row_X, offset_X = hidden_BQT.nonzero()
    return member_X, row_X, tables.start_S[member_B][member_X] + offset_X


def _tensor(array: np.ndarray, runner: FusedModel) -> Tensor:
    return torch.from_numpy(array).to(runner.device)
