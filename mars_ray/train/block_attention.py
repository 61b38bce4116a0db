"""Attention of blocks of mask rows: over the clean rows before the block, and inside the block.

It uses plain matrix products. On a CPU, scaled_dot_product_attention is five times slower here, and
its keys would include all mask rows. (Forward and backward take 9.0 ms, not 1.7, for 60 blocks of 4
over 180 clean rows, one thread, bfloat16.)

Shape suffixes: B rows of a batch, K blocks, W slots of a block, L clean rows, E key heads, G query
heads of each, Q = E * G, D head size, X = K * W * G rows of a key head, J = L + W keys of a row.
"""

from typing import Any

import torch
from torch import Tensor


class BlockAttention(torch.autograd.Function):
    """A slot sees the clean rows that its block sees, and the block's slots up to itself.

    Keys and values of clean rows get no gradient. Softmax is in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_BKWQD: Tensor,
        key_BKWED: Tensor,
        value_BKWED: Tensor,
        clean_key_BELD: Tensor,
        clean_value_BELD: Tensor,
        sees_BKL: Tensor,
        scale: float,
    ) -> Tensor:
        """Output of the heads at every slot, (B, K, W, Q * D)."""
        shape = query_BKWQD.shape
        heads, length = clean_key_BELD.shape[1:3]
        query = _by_key_head(query_BKWQD, heads)
        key, value = _by_key_head(key_BKWED, heads), _by_key_head(value_BKWED, heads)
        clean_key, clean_value = clean_key_BELD.flatten(0, 1), clean_value_BELD.flatten(0, 1)
        weights = _weights(query, key, clean_key, sees_BKL, shape, scale)
        to_clean, to_own = _split(weights, length)
        out = torch.bmm(to_clean, clean_value)
        out += _of_blocks(torch.bmm(_blocks(to_own, shape), _blocks(value, shape)), out)
        ctx.save_for_backward(query, key, value, clean_key, clean_value, weights)
        ctx.shape, ctx.heads, ctx.scale = shape, heads, scale
        return _by_slot(out, shape, heads).flatten(3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, clean_key, clean_value, weights = ctx.saved_tensors
        shape, heads = ctx.shape, ctx.heads
        length = clean_key.shape[1]
        grad = _by_key_head(grad.view(shape), heads)
        grad_blocks, own = _blocks(grad, shape), _blocks(weights[..., length:], shape)
        grad_value = torch.bmm(own.transpose(1, 2), grad_blocks)
        slope = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
        slope[..., :length] = torch.bmm(grad, clean_value.transpose(1, 2))
        to_own = torch.bmm(grad_blocks, _blocks(value, shape).transpose(1, 2))
        slope[..., length:] = _of_blocks(to_own, weights[..., length:])
        weights = weights.float()
        mean = torch.linalg.vecdot(slope, weights).unsqueeze_(-1)
        slope = slope.sub_(mean).mul_(weights.mul_(ctx.scale)).to(query.dtype)
        to_clean, to_own = _split(slope, length)
        grad_query = torch.bmm(to_clean, clean_key)
        own = _blocks(to_own, shape)
        grad_query += _of_blocks(torch.bmm(own, _blocks(key, shape)), grad_query)
        grad_key = torch.bmm(own.transpose(1, 2), _blocks(query, shape))
        one_each = (*shape[:3], heads, shape[4])
        return (
            _by_slot(grad_query, shape, heads),
            _by_slot(_of_blocks(grad_key, key), one_each, heads),
            _by_slot(_of_blocks(grad_value, value), one_each, heads),
            *(None,) * 4,
        )


def _weights(
    query: Tensor, key: Tensor, clean_key: Tensor, sees_BKL: Tensor, shape: Any, scale: float
) -> Tensor:
    """Attention weights, (B * E, X, L + W), in the queries' dtype."""
    rows, blocks, width = shape[:3]
    length = clean_key.shape[1]
    scores = torch.empty(
        (*query.shape[:2], length + width), dtype=torch.float32, device=query.device
    )
    scores[..., :length] = torch.bmm(query, clean_key.transpose(1, 2))
    own = torch.bmm(_blocks(query, shape), _blocks(key, shape).transpose(1, 2))
    scores[..., length:] = _of_blocks(own, scores[..., length:])
    by_block = scores.view(
        rows, -1, blocks, width, query.shape[1] // (blocks * width), scores.shape[2]
    )
    by_block[..., :length].masked_fill_(~sees_BKL[:, None, :, None, None], -torch.inf)
    later_WW = torch.ones(width, width, dtype=torch.bool, device=query.device).triu(1)
    by_block[..., length:].masked_fill_(later_WW[:, None], -torch.inf)
    return scores.mul_(scale).softmax(dim=-1).to(query.dtype)


def _by_key_head(x: Tensor, heads: int) -> Tensor:
    """(B, K, W, heads, D) as (B * E, K * W * heads of each, D)."""
    grouped = x.unflatten(3, (heads, -1)).permute(0, 3, 1, 2, 4, 5)
    return grouped.reshape(x.shape[0] * heads, -1, x.shape[4])


def _by_slot(x: Tensor, shape: Any, heads: int) -> Tensor:
    """The inverse of `_by_key_head`."""
    rows, blocks, width, _, size = shape
    grouped = x.view(rows, heads, blocks, width, -1, size)
    return grouped.permute(0, 2, 3, 1, 4, 5).reshape(shape)


def _blocks(x: Tensor, shape: Any) -> Tensor:
    """(B * E, K * rows of a block, ...) as a batch of blocks."""
    return x.reshape(x.shape[0] * shape[1], -1, x.shape[2])


def _of_blocks(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_blocks`."""
    return x.reshape(like.shape)


def _split(x: Tensor, length: int) -> tuple[Tensor, Tensor]:
    return x[..., :length], x[..., length:]
