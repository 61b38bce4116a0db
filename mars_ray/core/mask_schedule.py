"""The mask schedule: which response tokens get a noisy copy, and in which blocks.

It is a pure function of (progress, config, seed) and the sample, so a resumed run, or one on more
ranks, draws the same as an undisturbed one.

Shape suffixes: B rows, L tokens of a row, S choices.
"""

import torch
from torch import Tensor

from mars_ray.config.train import (
    BlockSchedule,
    ConstantBlockSize,
    CurriculumBlockSize,
    LinearWeight,
    MaskSchedule,
    MixedBlockSize,
)
from mars_ray.core.layout import TokenBatch, turn_starts
from mars_ray.core.sampling import uniform

# One stream of draws per purpose, so that no two decisions share a random number.
_BLOCK_SIZE, _GRID_OFFSET, _NOISY_SHARE, _DRAFT_GRIDS = 1, 2, 3, 4
_PROGRESS_STEPS = 1 << 40


def block_starts(batch: TokenBatch, schedule: MaskSchedule, progress: float, seed: int) -> Tensor:
    """Start of the block that each token's mask stands in, int64 (B, L); -1: no noisy copy.

    A block never reaches back over the start of its assistant turn, so its masks see every prompt
    token. With the grid at position 0, a turn's first block may thus be shorter than the others.

        position    0   1   2   3   4   5   6   7
        token       p   p   p   r   r   r   r   r       block size 4, grid "zero"
        start      -1  -1  -1   3   4   4   4   4
    """
    now = int(progress * _PROGRESS_STEPS)
    document_BL, position_BL = batch.document_BL, batch.position_BL
    size_BL = _block_sizes(schedule, document_BL, progress, now, seed)
    turn_BL = turn_starts(batch)
    match schedule.grid:
        case "zero":
            origin_BL = torch.zeros_like(position_BL)
        case "response":
            origin_BL = turn_BL
        case "random":
            draw_BL = uniform(seed, _GRID_OFFSET, now, document_BL)
            origin_BL = (draw_BL * size_BL).long()
    phase_BL = torch.remainder(position_BL - origin_BL, size_BL)
    start_BL = torch.maximum(position_BL - phase_BL, turn_BL)
    chosen_BL = batch.response_BL
    if schedule.noisy_share < 1:
        draw_BL = uniform(seed, _NOISY_SHARE, now, document_BL, start_BL)
        chosen_BL = chosen_BL & (draw_BL < schedule.noisy_share)
    return torch.where(chosen_BL, start_BL, -1)


def draft_blocks(
    batch: TokenBatch, schedule: BlockSchedule, grids: int, progress: float, seed: int
) -> Tensor:
    """Size of the block that starts at each token, int64 (B, L); 0: no block starts there.

    Each conversation is cut by `grids` grids, all of one block size, each with a different random
    offset. The blocks of two grids overlap, but never start at the same token.
    """
    now = int(progress * _PROGRESS_STEPS)
    document_BL, position_BL = batch.document_BL, batch.position_BL
    size_BL = _block_sizes(schedule, document_BL, progress, now, seed)
    # A conversation's grids take those of its S possible offsets that have the lowest draws.
    offset_S = torch.arange(int(size_BL.max()), device=document_BL.device)
    draw_BLS = uniform(seed, _DRAFT_GRIDS, now, document_BL[:, :, None], offset_S)
    draw_BLS = draw_BLS.masked_fill(offset_S >= size_BL[:, :, None], torch.inf)
    rank_BLS = draw_BLS.argsort(dim=-1).argsort(dim=-1)
    phase_BL1 = torch.remainder(position_BL, size_BL)[:, :, None]
    chosen_BL = rank_BLS.gather(2, phase_BL1).squeeze(2) < grids
    if schedule.noisy_share < 1:
        draw_BL = uniform(seed, _NOISY_SHARE, now, document_BL, position_BL)
        chosen_BL &= draw_BL < schedule.noisy_share
    return torch.where(chosen_BL & batch.response_BL, size_BL, 0)


def ar_weight(schedule: MaskSchedule, progress: float) -> float:
    """Weight of the clean stream's mean loss at this share of training."""
    if isinstance(schedule.ar_weight, LinearWeight):
        start, end = schedule.ar_weight.start, schedule.ar_weight.end
        return start + (end - start) * progress
    return schedule.ar_weight


def depth_weights(schedule: BlockSchedule) -> Tensor:
    """Weights of depths 1 .. max block size, float32; the last one given applies to the rest."""
    given = schedule.depth_weights or (1.0,)
    depths = range(schedule.max_block_size)
    return torch.tensor([given[min(depth, len(given) - 1)] for depth in depths])


def _block_sizes(
    schedule: BlockSchedule, document_BL: Tensor, progress: float, now: int, seed: int
) -> Tensor:
    match schedule.block_size:
        case ConstantBlockSize(size=size):
            return torch.full_like(document_BL, size)
        case MixedBlockSize(sizes=sizes, weights=weights):
            edges_S = torch.tensor(weights, dtype=torch.float64).cumsum(0)
            edges_S = (edges_S / edges_S[-1])[:-1].to(document_BL.device)
            draw_BL = uniform(seed, _BLOCK_SIZE, now, document_BL)
            size_S = torch.tensor(sizes, device=document_BL.device)
            return size_S[torch.bucketize(draw_BL, edges_S, right=True)]
        case CurriculumBlockSize(steps=steps):
            size = [step.size for step in steps if step.progress <= progress][-1]
            return torch.full_like(document_BL, size)
