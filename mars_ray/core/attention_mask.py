"""Which row may attend to which: one predicate, evaluated densely or in a flex-attention kernel.

The three rules (paper section 3.2):
1. a clean row sees the clean rows of its conversation up to its own position;
2. a noisy row sees the clean rows of its conversation before its block's start;
3. a noisy row sees the noisy rows of its own block up to its own position.
Padding is a separate conversation, -1, so no row is left without a key.

Shape suffixes: B batch, R rows of a layout.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from mars_ray.core.layout import Layout


def visible(
    document_q: Tensor,
    position_q: Tensor,
    block_q: Tensor,
    document_k: Tensor,
    position_k: Tensor,
    block_k: Tensor,
) -> Tensor:
    """Whether query q sees key k, elementwise over broadcast tensors."""
    clean_limit_q = torch.where(block_q >= 0, block_q, position_q + 1)
    sees_clean = (block_k < 0) & (position_k < clean_limit_q)
    sees_noisy = (block_k >= 0) & (block_k == block_q) & (position_k <= position_q)
    return (document_q == document_k) & (sees_clean | sees_noisy)


def dense_mask(layout: Layout) -> Tensor:
    """True where a row may attend, bool (B, 1, R, R)."""
    rows = (layout.document_BR, layout.position_BR, layout.block_BR)
    queries = [row_BR[:, None, :, None] for row_BR in rows]
    keys = [row_BR[:, None, None, :] for row_BR in rows]
    return visible(*queries, *keys)


def flex_mask(layout: Layout) -> BlockMask:
    """The same predicate as a flex-attention `BlockMask`."""
    document_BR, position_BR, block_BR = layout.document_BR, layout.position_BR, layout.block_BR

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(
            document_BR[batch, query],
            position_BR[batch, query],
            block_BR[batch, query],
            document_BR[batch, key],
            position_BR[batch, key],
            block_BR[batch, key],
        )

    rows, length = document_BR.shape
    return create_block_mask(rule, rows, None, length, length, device=document_BR.device)


def attention_mask(layout: Layout) -> Any:
    """The form that is fastest on the layout's device: flex on CUDA, dense elsewhere."""
    on_cuda = layout.input_ids_BR.device.type == "cuda"
    return flex_mask(layout) if on_cuda else dense_mask(layout)
