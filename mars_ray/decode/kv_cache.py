"""Keys and values in pages, and the attention of one forward over them.

A sequence's table lists its pages; its row i (of real tokens, then of what the step adds) lies at
place i of the table's pages, laid end to end. What lies behind a sequence's cursor is garbage that
its next forward overwrites before any row may look at it, so nothing ever needs to be erased.

The model is an unmodified Hugging Face one: it reaches this code through transformers' attention
interface, and `ATTENTION` is the name it is registered under.

Shape suffixes: N rows of a forward, S places of the pool, B sequences of a group, Q rows of the
longest of them, C places of the longest table, H key-value heads, G query heads of each, D head
size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mars_ray.errors import ModelError

ATTENTION = "mars_paged"


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
        if getattr(config, "use_sliding_window", False):
            raise ModelError("sliding-window attention is not supported by the decoding engine")
        heads, size = _heads(config)
        self.page_size = page_size
        # Zeros, not whatever was there: a place that no row may look at has weight 0, but 0 * NaN
        # is NaN. Memory that is never used is still never touched.
        self.layers = [
            torch.zeros((pages * page_size, 2, heads, size), device=device, dtype=dtype)
            for _ in range(config.num_hidden_layers)
        ]

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(layer.nbytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences whose rows attend together, padded to the longest.

    `row_BQ` are indices into the forward's rows, or None if the group is all of them, unpadded;
    `real` are the places of `row_BQ`, flattened, that are no padding.
    """

    row_BQ: Tensor | None
    real: Tensor | None
    page_BM: Tensor
    bias_B1QC: Tensor  # 0 where a row may look, -inf elsewhere


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Where one forward's rows store and find keys and values."""

    cache: PagedCache
    place_N: Tensor
    groups: list[Group]


def _heads(config: PretrainedConfig) -> tuple[int, int]:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads, size


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    paged: PagedStep | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Query (1, heads, N, D), key and value (1, H, N, D); returns (1, N, heads, D).

    Without `paged` it is transformers' own attention: the same model serves the reference.
    """
    if paged is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    layer = paged.cache.layers[module.layer_idx]  # type: ignore[index]
    layer[paged.place_N] = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)
    query_NHGD = query[0].transpose(0, 1).unflatten(1, (key.shape[1], -1))
    if paged.groups[0].row_BQ is None:
        return _attend_group(layer, paged, paged.groups[0], query_NHGD, scaling)[None], None
    out = query.new_empty((query.shape[2], query.shape[1], query.shape[3]))
    for group in paged.groups:
        assert group.row_BQ is not None
        rows = _attend_group(layer, paged, group, query_NHGD[group.row_BQ.flatten()], scaling)
        if group.real is None:
            out[group.row_BQ.flatten()] = rows
        else:
            out[group.row_BQ.flatten()[group.real]] = rows[group.real]
    return out[None], None


def _attend_group(
    layer: Tensor, paged: PagedStep, group: Group, query_NHGD: Tensor, scaling: float | None
) -> Tensor:
    """The group's rows, padding included: (B * Q, heads, D)."""
    batch, width = group.bias_B1QC.shape[0], group.bias_B1QC.shape[2]
    pages = layer.view(-1, paged.cache.page_size * layer[0].numel())
    kept = pages.index_select(0, group.page_BM.flatten())
    kv_BC2HD = kept.view(batch, -1, *layer.shape[1:])
    # The query heads that share a key head become rows of it: nothing has to be repeated.
    shared = query_NHGD.shape[2]
    query = query_NHGD.unflatten(0, (batch, width)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    bias = group.bias_B1QC.repeat(1, 1, shared, 1) if shared > 1 else group.bias_B1QC
    out = nn.functional.scaled_dot_product_attention(
        query,
        kv_BC2HD[:, :, 0].transpose(1, 2),
        kv_BC2HD[:, :, 1].transpose(1, 2),
        attn_mask=bias,
        scale=scaling,
    )
    return out.unflatten(2, (shared, width)).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)


AttentionInterface.register(ATTENTION, _attend)
