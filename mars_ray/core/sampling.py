"""From logits to a drawn token: changes that a request makes to the logits, truncation, and noise.

Random numbers are counter-based: a draw is a pure function of its keys, so neither the batch that a
sample sits in, nor the rank, nor a restart can change it. The mixer is SplitMix64 (Steele, Lea,
Flood, OOPSLA 2014).

The Gumbel-max trick: the argmax of log p plus independent Gumbel noise is a draw from p. Here the
noise of a token at a position is a pure function of the request's seed. So a draft and the row that
verifies it get the same noise, and a draft is right exactly if the row would have drawn it by
itself. A sampled text thus depends neither on drafts, nor on windows, nor on the batch. This is
"drafter invariance" (Daliri, Musco, Suresh, 2024, arXiv 2408.07978); they show that drafts agree
with probability at least (1 - d) / (1 + d) at total variation distance d.

Shape suffixes: N rows, V vocabulary, U tokens that occur in a text.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mars_ray.config.decode import Sampling

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 has only the arithmetic one."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(*keys: int | Tensor) -> Tensor:
    """Draws in [0, 1), float64, one for each element of the broadcast keys.

    Keys are integers or int64 tensors; their order matters.
    """
    state = torch.zeros((), dtype=torch.int64)
    for key in keys:
        if not isinstance(key, Tensor):
            # Any Python integer as the int64 of its low 64 bits.
            key = torch.tensor((key + (1 << 63)) % (1 << 64) - (1 << 63), dtype=torch.int64)
        # A host number is added as it is: a copy to the device would be waited for.
        state = state + key + _GAMMA
        state = (state ^ _shift_right(state, 30)) * _MIX_1
        state = (state ^ _shift_right(state, 27)) * _MIX_2
        state = state ^ _shift_right(state, 31)
    # 53 bits: the mantissa of a double, so 1.0 is never reached.
    return _shift_right(state, 11).to(torch.float64) * 2.0**-53


def adjust(
    logits_NV: Tensor,
    sampling: Sampling,
    prompt: Sequence[int],
    answers: Sequence[Sequence[int]],
    places: Sequence[int],
    stop_ids: Iterable[int],
) -> None:
    """Apply penalties, biases and the minimum length in place; float32 logits.

    `answers` holds the answer's tokens that each row sees, all with the same beginning. `places`
    says how many tokens of the answer precede the one that the row predicts; a mask sees fewer.
    Presence and frequency penalties are OpenAI's and count the answer only. The repetition penalty
    is that of `transformers` (CTRL, Keskar et al., 2019, section 4.1) and counts the prompt too.
    """
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        token_U, count_NU = _counts(prompt, answers, logits_NV.device)
        logits_NU = logits_NV[:, token_U]
        penalised_NU = torch.where(logits_NU > 0, logits_NU / penalty, logits_NU * penalty)
        logits_NV[:, token_U] = torch.where(count_NU > 0, penalised_NU, logits_NU)
    if sampling.presence_penalty or sampling.frequency_penalty:
        token_U, count_NU = _counts([], answers, logits_NV.device)
        penalty_NU = sampling.frequency_penalty * count_NU
        logits_NV[:, token_U] -= penalty_NU + sampling.presence_penalty * (count_NU > 0)
    if sampling.logit_bias:
        # All in one operation: there may be many biases, in every step of the answer.
        device = logits_NV.device
        tokens = torch.tensor(list(sampling.logit_bias), device=device)
        logits_NV[:, tokens] += torch.tensor(list(sampling.logit_bias.values()), device=device)
    if sampling.min_new_tokens:
        short_N = torch.tensor([place < sampling.min_new_tokens for place in places])
        for token in stop_ids:
            logits_NV[short_N.to(logits_NV.device), token] = -torch.inf


def _counts(
    prompt: Sequence[int], answers: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The tokens that occur, and how often each occurs in each row's text.

    The part that all rows share, which may be long, is counted once.
    """
    common = min(answers, key=len)
    behind = [answer[len(common) :] for answer in answers]
    text = np.fromiter(chain(prompt, common, *behind), np.int64)
    token_U, index = np.unique(text, return_inverse=True)
    shared = len(prompt) + len(common)
    count_NU = np.zeros((len(answers), len(token_U)), np.float32)
    count_NU += np.bincount(index[:shared], minlength=len(token_U))
    row = np.arange(len(answers)).repeat([len(tokens) for tokens in behind])
    np.add.at(count_NU, (row, index[shared:]), 1)
    return torch.from_numpy(token_U).to(device), torch.from_numpy(count_NU).to(device)


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
