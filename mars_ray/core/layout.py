"""Rows of tokens as the data loader hands them over, and the layouts of a training forward.

Both predict with the right shift: the row at position t predicts token t+1. A mask stands for the
token at its position: at offset j of a block that starts at s, it has position s+j and depth j+1,
and predicts token s+j+1. A noisy row is laid out only if that token is in the same turn. No mask
sees a later mask, so leaving out a row without a target changes no other row.

    compact, 3 prompt tokens, 4 of response, block size 2, blocks at 3 and 5

    row        0   1   2   3   4   5   6  |  7   8   9
    token     p0  p1  p2  r0  r1  r2  r3  | m0  m1  m2          (m3 would predict past the end)
    position   0   1   2   3   4   5   6  |  3   4   5
    block      -   -   -   -   -   -   -  |  3   3   5
    target     .   .  r0  r1  r2  r3   .  | r1  r2  r3
    depth      0   0   0   0   0   0   0  |  1   2   1

Which row may attend to which is one predicate, evaluated densely or in a flex-attention kernel. The
three rules (paper section 3.2):
1. a clean row sees the clean rows of its conversation up to its own position;
2. a noisy row sees the clean rows of its conversation before its block's start;
3. a noisy row sees the noisy rows of its own block up to its own position.
Padding is a separate conversation, -1, so no row is left without a key.

Shape suffixes: B rows of a batch, L clean tokens, M noisy rows, R = L + M rows of a layout.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

NO_TARGET = -100


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """B right-padded rows of L tokens; a row holds one conversation, or several when packed.

    `document_BL` is the conversation's index in its data set, -1 on padding. It separates packed
    conversations and is the key of every random draw made for them.
    """

    input_ids_BL: Tensor  # int64
    document_BL: Tensor  # int64
    position_BL: Tensor  # int64, position inside the conversation; 0 on padding
    response_BL: Tensor  # bool, the token belongs to an assistant turn


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything a forward and its loss need, row by row."""

    input_ids_BR: Tensor  # int64
    position_BR: Tensor  # int64, of the token the row holds or stands for
    document_BR: Tensor  # int64, -1 on padding
    block_BR: Tensor  # int64, start of the noisy row's block; -1 on clean rows
    target_BR: Tensor  # int64, the next token, NO_TARGET where there is none
    depth_BR: Tensor  # int64, 0 on clean rows, offset in the block + 1 on noisy ones
    # Float32 weight in the stream's mean. A row with a weight but no target is anchored: it is held
    # to what the starting model predicts there.
    weight_BR: Tensor

    @property
    def is_anchored_BR(self) -> Tensor:
        """Which rows have a distribution for a target, bool (B, R)."""
        return (self.weight_BR > 0) & (self.target_BR == NO_TARGET)

    @property
    def is_noisy_BR(self) -> Tensor:
        """Which rows are of the noisy stream, bool (B, R)."""
        return self.block_BR >= 0


def clean_layout(batch: TokenBatch) -> Layout:
    """The clean stream alone: ordinary supervised fine-tuning, L rows."""
    target_BL = clean_targets(batch)
    return Layout(
        input_ids_BR=batch.input_ids_BL,
        position_BR=batch.position_BL,
        document_BR=batch.document_BL,
        block_BR=torch.full_like(batch.input_ids_BL, -1),
        target_BR=target_BL,
        depth_BR=torch.zeros_like(batch.input_ids_BL),
        weight_BR=(target_BL != NO_TARGET).float(),
    )


def compact_layout(
    batch: TokenBatch, block_start_BL: Tensor, depth_weight: Tensor, mask_token_id: int
) -> Layout:
    """The layout `[clean L | noisy M]`; M is the largest number of noisy rows in the batch.

    `block_start_BL` is the result of `mask_schedule.block_starts`; `depth_weight` is indexed by
    depth - 1.
    """
    clean = clean_layout(batch)
    noisy = _noisy_stream(batch, block_start_BL, depth_weight, mask_token_id)
    keep_BL = noisy.target_BR != NO_TARGET
    width = int(keep_BL.sum(dim=1).max())
    # A stable sort of "not kept" moves the kept rows to the front in their order.
    index_BM = (~keep_BL).int().argsort(dim=1, stable=True)[:, :width]
    kept_BM = keep_BL.gather(1, index_BM)

    def take(rows_BL: Tensor, padding: float) -> Tensor:
        return rows_BL.gather(1, index_BM).masked_fill(~kept_BM, padding)

    noisy = Layout(
        input_ids_BR=take(noisy.input_ids_BR, 0),
        position_BR=take(noisy.position_BR, 0),
        document_BR=take(noisy.document_BR, -1),
        block_BR=take(noisy.block_BR, -1),
        target_BR=take(noisy.target_BR, NO_TARGET),
        depth_BR=take(noisy.depth_BR, 0),
        weight_BR=take(noisy.weight_BR, 0),
    )
    return side_by_side(clean, noisy)


def paper_layout(
    batch: TokenBatch, block_start_BL: Tensor, depth_weight: Tensor, mask_token_id: int
) -> Layout:
    """The layout `[noisy L | clean L]` of the reference implementation: 2L rows.

    Tokens without a noisy copy stay unmasked in the noisy half, as clean rows that predict nothing
    and that no other row sees.
    """
    clean = clean_layout(batch)
    noisy = _noisy_stream(batch, block_start_BL, depth_weight, mask_token_id)
    return side_by_side(noisy, clean)


def with_own_answers(layout: Layout, own_from: int, anchor_weight: float) -> Layout:
    """The layout when the model itself wrote the answers of conversations from `own_from` on.

    Learning its own words by cross-entropy would only sharpen the clean stream on them. So those
    rows lose their target, and become anchored with `anchor_weight`.
    """
    own_BR = (
        (layout.document_BR >= own_from) & ~layout.is_noisy_BR & (layout.target_BR != NO_TARGET)
    )
    return replace(
        layout,
        target_BR=layout.target_BR.masked_fill(own_BR, NO_TARGET),
        weight_BR=layout.weight_BR.masked_fill(own_BR, anchor_weight),
    )


def clean_targets(batch: TokenBatch) -> Tensor:
    """The token each clean row predicts, (B, L): the next one, if it belongs to a response."""
    target_BL = torch.full_like(batch.input_ids_BL, NO_TARGET)
    wanted_BL = batch.response_BL[:, 1:] & (batch.document_BL[:, 1:] == batch.document_BL[:, :-1])
    target_BL[:, :-1] = torch.where(wanted_BL, batch.input_ids_BL[:, 1:], NO_TARGET)
    return target_BL


def turn_starts(batch: TokenBatch) -> Tensor:
    """Position of the first token of each response token's assistant turn, int64 (B, L).

    The value is meaningless on tokens outside a response.
    """
    response_BL, position_BL = batch.response_BL, batch.position_BL
    same_BL = torch.zeros_like(response_BL)
    same_BL[:, 1:] = response_BL[:, :-1] & (batch.document_BL[:, 1:] == batch.document_BL[:, :-1])
    index_BL = torch.arange(response_BL.shape[1], device=response_BL.device).expand_as(position_BL)
    first_BL = torch.where(response_BL & ~same_BL, index_BL, 0).cummax(dim=1).values
    return position_BL.gather(1, first_BL)


def same_turn_as_next(batch: TokenBatch) -> Tensor:
    """Whether a response token's successor is in its turn, bool (B, L); meaningless on others."""
    turn_BL = turn_starts(batch)
    same_BL = torch.zeros_like(batch.response_BL)
    same_BL[:, :-1] = (
        batch.response_BL[:, 1:]
        & (turn_BL[:, 1:] == turn_BL[:, :-1])
        & (batch.document_BL[:, 1:] == batch.document_BL[:, :-1])
    )
    return same_BL


def _noisy_stream(
    batch: TokenBatch, block_start_BL: Tensor, depth_weight: Tensor, mask_token_id: int
) -> Layout:
    """The noisy half of the paper's layout: one row per clean token."""
    is_mask_BL = block_start_BL >= 0
    has_target_BL = is_mask_BL & same_turn_as_next(batch)
    depth_BL = torch.where(is_mask_BL, batch.position_BL - block_start_BL + 1, 0)
    weight_BL = depth_weight.to(depth_BL.device)[(depth_BL - 1).clamp_min(0)]
    return Layout(
        input_ids_BR=torch.where(is_mask_BL, mask_token_id, batch.input_ids_BL),
        position_BR=batch.position_BL,
        document_BR=batch.document_BL,
        # An unmasked token of the noisy half is a block by itself: it sees the clean tokens before
        # it and itself, as its clean twin does.
        block_BR=torch.where(is_mask_BL, block_start_BL, batch.position_BL),
        target_BR=torch.where(has_target_BL, clean_targets(batch), NO_TARGET),
        depth_BR=depth_BL,
        weight_BR=torch.where(has_target_BL, weight_BL, 0.0),
    )


def side_by_side(left: Layout, right: Layout) -> Layout:
    """The rows of one layout, then those of the other."""
    return Layout(
        *(
            torch.cat([getattr(left, name), getattr(right, name)], dim=1)
            for name in Layout.__slots__
        )
    )


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
