"""Changes that a request makes to a row's logits before a token is chosen from them.

Shape suffixes: N rows, V vocabulary, U tokens that occur in a text.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mars_ray.config.decode import Sampling


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
        _penalise_repetition(logits_NV, sampling.repetition_penalty, prompt, answers)
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


def _penalise_repetition(
    logits_NV: Tensor, penalty: float, prompt: Sequence[int], answers: Sequence[Sequence[int]]
) -> None:
    token_U, count_NU = _counts(prompt, answers, logits_NV.device)
    logits_NU = logits_NV[:, token_U]
    penalised_NU = torch.where(logits_NU > 0, logits_NU / penalty, logits_NU * penalty)
    logits_NV[:, token_U] = torch.where(count_NU > 0, penalised_NU, logits_NU)


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
