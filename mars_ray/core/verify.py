"""Verification of drafts by the causal rows of the next forward (design: `verified`).

At threshold 1 it is lossless: greedy agreement, or speculative sampling (Leviathan et al., 2023,
arXiv 2211.17192, section 2.3). Below 1 a draft needs only that share of what it would need.

Shape suffixes: K drafts, N rows, V vocabulary.
"""

import torch
from torch import Tensor


def greedy_accepts(logits_KV: Tensor, draft_K: Tensor, threshold: float) -> Tensor:
    """Whether each draft d passes p(d) >= threshold * max p, bool (K,).

    At threshold 1 the draft must be the argmax itself, so that a tie cannot change the output.
    """
    if threshold == 1:
        return logits_KV.argmax(dim=-1) == draft_K
    log_p_KV = torch.log_softmax(logits_KV.float(), dim=-1)
    draft_p_K = log_p_KV.gather(-1, draft_K.unsqueeze(-1)).squeeze(-1).exp()
    return draft_p_K >= threshold * log_p_KV.amax(dim=-1).exp()


def sampled_accepts(
    p_KV: Tensor, q_KV: Tensor, draft_K: Tensor, threshold: float, uniform_K: Tensor
) -> Tensor:
    """Whether each draft d, drawn from q, passes u < p(d) / (threshold * q(d)), bool (K,).

    Threshold 0 accepts every draft that the target gives any mass.
    """
    p_K = p_KV.gather(-1, draft_K.unsqueeze(-1)).squeeze(-1).double()
    q_K = q_KV.gather(-1, draft_K.unsqueeze(-1)).squeeze(-1).double()
    return uniform_K.to(p_K.device) * threshold * q_K < p_K


def residual(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """What to draw from after a rejection: max(p - q, 0), normalised, float32 (N, V).

    Where p = q nothing can have been rejected but by rounding; then p itself is returned.
    """
    rest_NV = (p_NV - q_NV).clamp_min(0)
    mass_N1 = rest_NV.sum(dim=-1, keepdim=True)
    return torch.where(mass_N1 > 0, rest_NV / mass_N1.clamp_min(1e-30), p_NV)
