"""The layout that a draft adapter is trained on: a clean stream that is only read, and mask rows.

Mask rows are as in `layout`: the mask for position t stands for token t and predicts token t+1, as
its twin does, the clean row at t. They lie block by block. Every block is as wide as the widest, so
that attention inside blocks is a batch of small products; slots without a target are padding.

    3 prompt tokens, 5 of response, blocks of 2 that start at 3, 4 and 6

    row        0   1   2   3   4   5   6   7  |  8   9  10  11  12  13
    token     p0  p1  p2  r0  r1  r2  r3  r4  | r0  r1  r1  r2  r3   -
    position   0   1   2   3   4   5   6   7  |  3   4   4   5   6   -
    block      -   -   -   -   -   -   -   -  |  3   3   4   4   6   -
    target     .   .   .   .   .   .   .   .  | r1  r2  r2  r3  r4   .
    depth      0   0   0   0   0   0   0   0  |  1   2   1   2   1   -

A mask row's token is the one that it stands for. No mask row sees it; the sequential head receives
it when it predicts the next token.

Shape suffixes: B rows of a batch, L clean tokens, K blocks of a row, W slots of a block, M = K * W
mask rows, R = L + M.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mars_ray.core.layout import (
    NO_TARGET,
    Layout,
    TokenBatch,
    clean_layout,
    clean_targets,
    same_turn_as_next,
    side_by_side,
    turn_starts,
)


def draft_layout(batch: TokenBatch, size_BL: Tensor, depth_weight: Tensor) -> Layout:
    """The layout `[clean L | masks M]`; `size_BL` is the result of `mask_schedule.draft_blocks`.

    `depth_weight` is indexed by depth - 1. There is always a block, if necessary one of padding.
    """
    has_target_BL = same_turn_as_next(batch) & batch.response_BL
    size_BL = torch.where(has_target_BL, size_BL, 0)
    count = max(1, int((size_BL > 0).sum(dim=1).max()))
    # A stable sort of "starts no block" moves the starts to the front in their order.
    start_BK = (size_BL == 0).int().argsort(dim=1, stable=True)[:, :count]
    depth_BKW = _depths(batch, start_BK, size_BL, has_target_BL)
    # The ends of their turns may cut all blocks short.
    depth_BKW = depth_BKW[:, :, : max(1, int(depth_BKW.max()))]
    width = depth_BKW.shape[2]
    depth_BM, kept_BM = depth_BKW.flatten(1), (depth_BKW > 0).flatten(1)
    index_BKW = start_BK[:, :, None] + torch.arange(width, device=start_BK.device)
    index_BM = index_BKW.flatten(1).clamp_max(size_BL.shape[1] - 1)

    def take(rows_BL: Tensor) -> Tensor:
        return rows_BL.gather(1, index_BM)

    start_BM = batch.position_BL.gather(1, start_BK).repeat_interleave(width, dim=1)
    masks = Layout(
        input_ids_BR=take(batch.input_ids_BL),
        position_BR=take(batch.position_BL).masked_fill(~kept_BM, 0),
        document_BR=take(batch.document_BL).masked_fill(~kept_BM, -1),
        block_BR=start_BM.masked_fill(~kept_BM, -1),
        target_BR=take(clean_targets(batch)).masked_fill(~kept_BM, NO_TARGET),
        depth_BR=depth_BM,
        weight_BR=torch.where(
            kept_BM, depth_weight.to(depth_BM.device)[(depth_BM - 1).clamp_min(0)], 0.0
        ),
    )
    no_target_BL = torch.full_like(batch.input_ids_BL, NO_TARGET)
    no_weight_BL = torch.zeros_like(no_target_BL, dtype=torch.float32)
    clean = replace(clean_layout(batch), target_BR=no_target_BL, weight_BR=no_weight_BL)
    return side_by_side(clean, masks)


def _depths(batch: TokenBatch, start_BK: Tensor, size_BL: Tensor, has_target_BL: Tensor) -> Tensor:
    """Depth of every slot of every block, (B, K, W); 0 where it holds no mask."""
    slot_W = torch.arange(max(1, int(size_BL.max())), device=size_BL.device)
    column_BKW = start_BK[:, :, None] + slot_W
    index_BM = column_BKW.flatten(1).clamp_max(size_BL.shape[1] - 1)

    def same(rows_BL: Tensor) -> Tensor:
        """Whether a slot has the same value as its block's start."""
        rows_BKW = rows_BL.gather(1, index_BM).view_as(column_BKW)
        return rows_BKW == rows_BL.gather(1, start_BK)[:, :, None]

    kept_BKW = slot_W < size_BL.gather(1, start_BK)[:, :, None]
    kept_BKW = kept_BKW & (column_BKW < size_BL.shape[1])
    kept_BKW &= has_target_BL.gather(1, index_BM).view_as(column_BKW)
    kept_BKW &= same(turn_starts(batch)) & same(batch.document_BL)
    return torch.where(kept_BKW, slot_W + 1, 0)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The parts of a draft layout that the clean pass and the mask pass need."""

    ids_BL: Tensor
    position_BL: Tensor
    document_BL: Tensor
    token_BM: Tensor  # the token that each mask stands for
    position_BM: Tensor
    depth_BM: Tensor  # 0 on padding
    target_BM: Tensor
    twin_BM: Tensor  # column of the clean row at the same position; arbitrary on padding
    sees_BKL: Tensor  # which clean rows the masks of a block see
    width: int  # slots of each block

    @classmethod
    def of(cls, layout: Layout) -> "DraftRows":
        """Take apart a draft layout."""
        depth_BR = layout.depth_BR.cpu()
        is_mask_R = (depth_BR > 0).any(dim=0)
        # Without masks there is one block of padding, as wide as one slot.
        length, width = len(is_mask_R) - 1, max(1, int(depth_BR.max()))
        if is_mask_R.any():
            length = int(is_mask_R.int().argmax())
        clean, masks = slice(None, length), slice(length, None)
        document_BL, position_BL = layout.document_BR[:, clean], layout.position_BR[:, clean]
        document_BM, position_BM = layout.document_BR[:, masks], layout.position_BR[:, masks]
        same_BML = document_BM[:, :, None] == document_BL[:, None]
        twin_BML = same_BML & (position_BM[:, :, None] == position_BL[:, None])
        first = slice(None, None, width)
        start_BK1 = layout.block_BR[:, masks][:, first, None]
        sees_BKL = same_BML[:, first] & (position_BL[:, None] < start_BK1)
        return cls(
            ids_BL=layout.input_ids_BR[:, clean],
            position_BL=position_BL,
            document_BL=document_BL,
            token_BM=layout.input_ids_BR[:, masks],
            position_BM=position_BM,
            depth_BM=layout.depth_BR[:, masks],
            target_BM=layout.target_BR[:, masks],
            twin_BM=twin_BML.int().argmax(dim=2),
            sees_BKL=sees_BKL,
            width=width,
        )
