"""Keys and values in pages, and the attention of one forward over them.

A sequence's table lists its pages; its row i (of real tokens, then of what the step adds) lies at
place i of the table's pages, laid end to end. What lies behind a sequence's cursor is garbage that
its next forward overwrites before any row may look at it, so nothing ever needs to be erased.

Shape suffixes: N rows of a forward, B sequences of a group, Q rows of the longest of them, M pages
of the longest table, C its places, H key-value heads, G query heads of each, T all query heads, R
rows of a key head (Q * G), D head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig


def page_bytes(config: PretrainedConfig, page_size: int, dtype: torch.dtype) -> int:
    """Memory of one page over all layers."""
    heads, size = _heads(config)
    return 2 * heads * size * page_size * config.num_hidden_layers * dtype.itemsize


class PagedCache:
    """The memory: per layer a tensor (places, 2, H, D), keys and values side by side."""

    def __init__(
        self,
        config: PretrainedConfig,
        pages: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        heads, size = _heads(config)
        self.page_size = page_size
        self.shared_heads = config.num_attention_heads // heads  # query heads of a key head
        # Zeros, not whatever was there: a place that no row may look at has weight 0, but 0 * NaN
        # is NaN. Memory that is never used is still never touched.
        self.layers = [
            torch.zeros((pages * page_size, 2, heads, size), device=device, dtype=dtype)
            for _ in range(config.num_hidden_layers)
        ]
        # The same memory, a row for each page.
        self.pages = [layer.view(pages, -1) for layer in self.layers]

        # Row r of the windows over this line hides what lies behind place (places - 1 - r).
        hidden = torch.full((len(self.layers[0]),), -torch.inf, device=device, dtype=dtype)
        self._line = torch.cat([torch.zeros_like(hidden), hidden])

    def causal(self, index_X: Tensor, places: int) -> Tensor:
        """What attention adds to the scores of rows at these places: (X, places)."""
        most = len(self.layers[0])
        window_PC = self._line.as_strided((most, places), (1, 1))
        return window_PC.index_select(0, most - 1 - index_X)

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(layer.nbytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences whose rows attend together, padded to the longest.

    `row_X` are indices into the forward's rows, B * Q of them, or None if they are all rows in
    their order.
    """

    batch: int
    row_X: Tensor | None
    page_X: Tensor  # B * M
    bias_B1RC: Tensor  # 0 where a row may look, -inf elsewhere


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Where one forward's rows store and find keys and values.

    `back_N` says where each row is found among the rows of all groups, laid end to end with their
    padding; None if that is where it was.
    """

    cache: PagedCache
    place_N: Tensor
    groups: list[Group]
    back_N: Tensor | None


def attend(step: PagedStep, layer: int, query_NTD: Tensor, kv_N2HD: Tensor, scale: float) -> Tensor:
    """Store the rows' keys and values, then attend: (N, T * D)."""
    step.cache.layers[layer].index_copy_(0, step.place_N, kv_N2HD)
    pages, heads = step.cache.pages[layer], kv_N2HD.shape[2]
    parts = [_attend_group(pages, heads, group, query_NTD, scale) for group in step.groups]
    out_XV = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out_XV if step.back_N is None else out_XV.index_select(0, step.back_N)


def _attend_group(
    pages: Tensor, heads: int, group: Group, query_NTD: Tensor, scale: float
) -> Tensor:
    """The group's rows, padding included: (B * Q, T * D)."""
    query_XTD = query_NTD if group.row_X is None else query_NTD.index_select(0, group.row_X)
    rows, queries, size = query_XTD.shape
    batch, shared = group.batch, queries // heads
    width = rows // batch
    kv_BC2HD = pages.index_select(0, group.page_X).view(batch, -1, 2, heads, size)
    key_BHCD, value_BHCD = kv_BC2HD.permute(2, 0, 3, 1, 4).unbind(0)
    # The query heads that share a key head become rows of it: nothing has to be repeated.
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


def _heads(config: PretrainedConfig) -> tuple[int, int]:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads, size
