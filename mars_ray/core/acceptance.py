"""Acceptance of proposals: by confidence, by verification, and estimated without generating.

- `confidence` and `passes`: the paper's left-to-right rule (section 3.3). Everything is float32: a
  bfloat16 softmax rounds p > 0.998 to 1.
- `acceptance_counts`: what `verified` decoding would commit, teacher-forced. In a block after the
  data's text, the mask rows give the drafts, and the clean rows at the same positions give what
  autoregressive decoding would choose. Depth d survives in a block if depths 1 .. d all agree.
  This is an estimate, since the data's text stands in for the model's own.

Shape suffixes: N rows, V vocabulary, B batch, R rows of a layout, M noisy rows, D depths.
"""

import torch
from torch import Tensor

from mars_ray.config.modes import Measure
from mars_ray.core.layout import NO_TARGET, Layout


def confidence(logits_NV: Tensor, measure: Measure) -> Tensor:
    """Confidence of each row, float32 (N,).

    `probability`: the largest p. `margin`: largest minus second largest. `entropy`: in nats, where
    less is more confident. Leading dimensions other than N are kept.
    """
    log_p_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    match measure:
        case "probability":
            return log_p_NV.amax(dim=-1).exp()
        case "margin":
            top_N2 = log_p_NV.topk(2, dim=-1).values.exp()
            return top_N2[..., 0] - top_N2[..., 1]
        case "entropy":
            # A banned token has log p = -inf: its term is 0, not nan.
            return -(log_p_NV.exp() * log_p_NV.clamp_min(-1e30)).sum(dim=-1)


def passes(number: float, threshold: float, measure: Measure) -> bool:
    """Whether a proposal is confident enough; entropy passes at or below."""
    return number <= threshold if measure == "entropy" else number >= threshold


def acceptance_counts(layout: Layout, predicted_BR: Tensor, depths: int) -> Tensor:
    """Blocks that reach depth d, and those of them where depths 1..d agree, float64 (2, D).

    `predicted_BR` holds each row's argmax (anything where there is no target). Counts add up over
    batches and ranks.
    """
    counts = torch.zeros(2, depths, dtype=torch.float64, device=predicted_BR.device)
    for row in range(predicted_BR.shape[0]):
        noisy_R = (layout.depth_BR[row] > 0) & (layout.target_BR[row] != NO_TARGET)
        if not noisy_R.any():
            continue
        index_M = noisy_R.nonzero().squeeze(1)
        clean_R = ~layout.is_noisy_BR[row] & (layout.document_BR[row] >= 0)
        keys = layout.document_BR[row] * (1 << 32) + layout.position_BR[row]
        order = torch.where(clean_R, keys, torch.iinfo(keys.dtype).max).argsort()
        twin_M = order[torch.searchsorted(keys[order][: int(clean_R.sum())], keys[index_M])]
        agree_M = predicted_BR[row, index_M] == predicted_BR[row, twin_M]
        # A block's rows are adjacent, in rising depth: a disagreement at depth d rules out every
        # deeper row of the block.
        depth_M = layout.depth_BR[row, index_M]
        block_M = (depth_M == 1).cumsum(0)
        first_bad = torch.full((int(block_M[-1]) + 1,), 1 << 30, device=depth_M.device)
        first_bad.scatter_reduce_(0, block_M[~agree_M], depth_M[~agree_M], "amin")
        survives_M = depth_M < first_bad[block_M]
        counts[0] += torch.bincount(depth_M - 1, minlength=depths)
        counts[1] += torch.bincount(depth_M[survives_M] - 1, minlength=depths)
    return counts


def survival(counts: Tensor) -> list[float]:
    """Share of blocks in which depths 1..d agree, for each depth that was seen."""
    reached, agreed = counts.tolist()
    return [a / r for r, a in zip(reached, agreed, strict=True) if r > 0]
