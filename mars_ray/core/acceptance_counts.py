"""Teacher-forced acceptance: what `verified` decoding would commit, without generating.

On a block whose prefix is the data's, the mask rows are the drafts and the clean rows at the same
positions are what autoregressive decoding would choose. Depth d survives in a block if depths
1 .. d all agree. The data's text stands in for the model's own, so this is an estimate.

Shape suffixes: B batch, R rows of a layout, M noisy rows, D depths.
"""

import torch
from torch import Tensor

from mars_ray.core.layout import NO_TARGET, Layout


def acceptance_counts(layout: Layout, predicted_BR: Tensor, depths: int) -> Tensor:
    """Blocks that reach depth d, and those of them where depths 1..d agree, float64 (2, D).

    `predicted_BR` holds each row's argmax (anything where there is no target). Additive over
    batches and ranks.
    """
    counts = torch.zeros(2, depths, dtype=torch.float64, device=predicted_BR.device)
    for row in range(predicted_BR.shape[0]):
        noisy_M = (layout.depth_BR[row] > 0) & (layout.target_BR[row] != NO_TARGET)
        if noisy_M.any():
            _count_row(layout, predicted_BR, row, noisy_M.nonzero().squeeze(1), counts)
    return counts


def _count_row(
    layout: Layout, predicted_BR: Tensor, row: int, index_M: Tensor, counts: Tensor
) -> None:
    clean_R = ~layout.is_noisy_BR[row] & (layout.document_BR[row] >= 0)
    keys = layout.document_BR[row] * (1 << 32) + layout.position_BR[row]
    order = torch.where(clean_R, keys, torch.iinfo(keys.dtype).max).argsort()
    twin_M = order[torch.searchsorted(keys[order][: int(clean_R.sum())], keys[index_M])]
    agree_M = predicted_BR[row, index_M] == predicted_BR[row, twin_M]
    # Rows of a block lie next to each other in rising depth: a disagreement at depth d rules out
    # every deeper one of its block.
    depth_M = layout.depth_BR[row, index_M]
    block_M = (depth_M == 1).cumsum(0)
    first_bad = torch.full((int(block_M[-1]) + 1,), 1 << 30, device=depth_M.device)
    first_bad.scatter_reduce_(0, block_M[~agree_M], depth_M[~agree_M], "amin")
    survives_M = depth_M < first_bad[block_M]
    counts[0] += torch.bincount(depth_M - 1, minlength=counts.shape[1])
    counts[1] += torch.bincount(depth_M[survives_M] - 1, minlength=counts.shape[1])


def acceptance_weights(ce_M: Tensor, depth_M: Tensor) -> Tensor:
    """What a noisy row's log-probability adds to the expected accepted length, float64 (M,).

    With p_d the probability of the right token at depth d, a block is expected to be accepted for
    E = p_1 + p_1 p_2 + ... tokens, and dE / d log p_d is the sum of the products that hold p_d:
    shallow rows count for all behind them, and a row behind a hopeless one for little. Scaled to
    mean 1: without it a model that accepts nothing yet learns next to nothing (docs/log.md).
    Blocks follow each other, each in rising depth from 1.
    """
    first = (depth_M == 1).nonzero().squeeze(1)
    block_M = (depth_M == 1).cumsum(0) - 1
    last = torch.cat([first[1:], first.new_tensor([len(depth_M)])]) - 1
    total_M = ce_M.double().cumsum(0)
    before = total_M[first] - ce_M.double()[first]
    survival_M = (before[block_M] - total_M).exp()
    sum_M = survival_M.cumsum(0)
    tail_M = sum_M[last][block_M] - sum_M + survival_M
    return tail_M / tail_M.mean()


def survival(counts: Tensor) -> list[float]:
    """Share of blocks in which depths 1..d agree, for each depth that was seen."""
    reached, agreed = counts.tolist()
    return [a / r for r, a in zip(reached, agreed, strict=True) if r > 0]


def expected_tokens_per_forward(counts: Tensor) -> float:
    """Expected T/F of greedy `verified` decoding that always has drafts: 1 + sum of survivals."""
    return 1 + sum(survival(counts))
