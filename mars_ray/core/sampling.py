"""From logits to a distribution to a token.

Shape suffixes: N rows, V vocabulary.
"""

import torch
from torch import Tensor

from mars_ray.config.decode import Sampling


def probabilities(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution a token is drawn from, float32 (N, V): temperature, then top-k, then top-p.

    Temperature 0 gives all mass to the largest logit. Top-k keeps ties with the k-th logit; top-p
    keeps the smallest set of tokens whose mass reaches `top_p`, as in `transformers`.
    """
    if sampling.temperature == 0:
        best_N = logits_NV.argmax(dim=-1)
        return torch.nn.functional.one_hot(best_N, logits_NV.shape[-1]).float()
    logits_NV = logits_NV.float() / sampling.temperature
    if 0 < sampling.top_k < logits_NV.shape[-1]:
        kth_N1 = logits_NV.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < kth_N1, -torch.inf)
    p_NV = logits_NV.softmax(dim=-1)
    if sampling.top_p < 1:
        sorted_NV, order_NV = p_NV.sort(dim=-1, descending=True, stable=True)
        mass_before_NV = sorted_NV.cumsum(dim=-1) - sorted_NV
        drop_NV = torch.zeros_like(p_NV, dtype=torch.bool).scatter(
            -1, order_NV, mass_before_NV >= sampling.top_p
        )
        p_NV = p_NV.masked_fill(drop_NV, 0)
        p_NV = p_NV / p_NV.sum(dim=-1, keepdim=True)
    return p_NV


def choose(p_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Draw a token of each row by inverting its distribution function, int64 (N,)."""
    # In float64: 150,000 float32 terms would move the edges by more than a draw's resolution.
    edges_NV = p_NV.double().cumsum(dim=-1)
    point_N1 = (uniform_N.to(p_NV.device) * edges_NV[..., -1]).unsqueeze(-1)
    token_N = torch.searchsorted(edges_NV, point_N1, right=True).squeeze(-1)
    # Rounding can put the point on the last edge; the last token with any mass is meant then.
    last_N = p_NV.shape[-1] - 1 - (p_NV > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(token_N, last_N)
