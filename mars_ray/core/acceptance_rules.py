"""Confidence of proposals and the left-to-right acceptance rule (paper section 3.3).

Everything is float32: a bfloat16 softmax rounds p > 0.998 to 1.

Shape suffixes: N rows, V vocabulary.
"""

from typing import Literal

import torch
from torch import Tensor

Measure = Literal["probability", "margin", "entropy"]


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


def passes(confidence_N: Tensor, threshold: float, measure: Measure) -> Tensor:
    """Whether each proposal is confident enough, bool (N,); entropy passes at or below."""
    if measure == "entropy":
        return confidence_N <= threshold
    return confidence_N >= threshold


def accepted_prefix(passed_N: Tensor) -> int:
    """How many proposals are accepted left to right: the length of the leading run of True."""
    return int(passed_N.long().cumprod(dim=-1).sum())
