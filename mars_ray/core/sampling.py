"""From logits to scores whose argmax is the token: noise that is fixed before anything is drawn.

The Gumbel-max trick: the argmax of log p plus independent Gumbel noise is a draw from p. Here the
noise of a token at a position is a pure function of the request's seed. So a draft and the row that
verifies it get the same noise, and a draft is right exactly if the row would have drawn it by
itself. A sampled text thus depends neither on drafts, nor on windows, nor on the batch. This is
"drafter invariance" (Daliri, Musco, Suresh, 2024, arXiv 2408.07978); they show that drafts agree
with probability at least (1 - d) / (1 + d) at total variation distance d.

Shape suffixes: N rows, V vocabulary.
"""

import math

import torch
from torch import Tensor

from mars_ray.config.decode import Sampling
from mars_ray.core.randomness import uniform

_NOISE = 11  # keeps these random numbers apart from those of other purposes
# The lowest temperature used: noise here decides only between equal logits, and far lower ones
# overflow float32. A power of 2, so that dividing by it never makes two logits equal.
_COLDEST = 2.0**-64


def truncated(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities, float32 (N, V): temperature, then top-k, top-p and min-p.

    Tokens that are cut become -inf; the rest need not sum to 1, which moves no argmax. As in
    `transformers`, top-k keeps ties with the k-th logit; top-p keeps the smallest set of tokens
    whose mass reaches `top_p`; min-p cuts tokens below that share of the largest probability.
    """
    logits_NV = logits_NV.float() / max(sampling.temperature, _COLDEST)
    if 0 < sampling.top_k < logits_NV.shape[-1]:
        kth_N1 = logits_NV.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < kth_N1, -torch.inf)
    log_p_NV = logits_NV.log_softmax(dim=-1)
    if sampling.top_p < 1:
        sorted_NV, order_NV = log_p_NV.sort(dim=-1, descending=True, stable=True)
        # Rolled, because subtracting a token's own mass from the sum again would not be exact.
        mass_before_NV = sorted_NV.exp().cumsum(dim=-1).roll(1, dims=-1)
        # Less than any `top_p`, which may be 0 in float32, so that the best token is never cut.
        mass_before_NV[..., 0] = -1
        drop_NV = torch.zeros_like(log_p_NV, dtype=torch.bool).scatter(
            -1, order_NV, mass_before_NV >= sampling.top_p
        )
        log_p_NV = log_p_NV.masked_fill(drop_NV, -torch.inf)
    if sampling.min_p > 0:
        best_N1 = log_p_NV.amax(dim=-1, keepdim=True)
        low_NV = log_p_NV < best_N1 + math.log(sampling.min_p)
        log_p_NV = log_p_NV.masked_fill(low_NV, -torch.inf)
    return log_p_NV


def scores(
    logits_NV: Tensor,
    sampling: Sampling,
    position_N: Tensor,
    seed_N: Tensor | None = None,
    token_NV: Tensor | None = None,
) -> Tensor:
    """Scores whose argmax is the token for each row's position, float32 (N, V).

    At temperature 0 they are the logits, otherwise log-probabilities plus noise. `seed_N` gives the
    rows' seeds if they are not all `sampling.seed`; `token_NV` gives the columns' tokens if these
    are not the whole vocabulary in order.
    """
    if sampling.temperature == 0:
        return logits_NV.float()
    if token_NV is None:
        token_NV = torch.arange(logits_NV.shape[-1], device=logits_NV.device)
    key_N1 = position_N.to(logits_NV.device)[:, None]
    seed = sampling.seed if seed_N is None else seed_N.to(logits_NV.device)[:, None]
    uniform_NV = uniform(seed, _NOISE, key_N1, token_NV)
    # In float64 the noise reaches far enough for one draw in 10^15; 0 itself would be -inf.
    noise_NV = -(-uniform_NV.clamp_min(2.0**-54).log()).log()
    return truncated(logits_NV, sampling) + noise_NV.float()
