"""What a request changes in a row's logits before a token is taken from them.

Shape suffixes: N rows, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mars_ray.config.decode import Sampling


def adjust(
    logits_NV: Tensor,
    sampling: Sampling,
    prompt: Sequence[int],
    answers: Sequence[Sequence[int]],
    stop_ids: Iterable[int],
) -> None:
    """Apply penalties, biases and the least length in place; float32 logits.

    `answers` are the answer's tokens before each row. Presence and frequency penalties are OpenAI's
    and count the answer only; the repetition penalty is that of `transformers` (CTRL, Keskar et
    al., 2019, section 4.1) and regards the prompt too.
    """
    if sampling.repetition_penalty != 1:
        _penalise_repetition(logits_NV, sampling.repetition_penalty, prompt, answers)
    if sampling.presence_penalty or sampling.frequency_penalty:
        count_NV = _counts(logits_NV, answers)
        logits_NV -= sampling.frequency_penalty * count_NV
        logits_NV -= sampling.presence_penalty * (count_NV > 0)
    if sampling.logit_bias:
        # All in one operation: there may be many, in every step of the answer.
        device = logits_NV.device
        tokens = torch.tensor(list(sampling.logit_bias), device=device)
        logits_NV[:, tokens] += torch.tensor(list(sampling.logit_bias.values()), device=device)
    if sampling.min_new_tokens:
        short_N = torch.tensor([len(answer) < sampling.min_new_tokens for answer in answers])
        for token in stop_ids:
            logits_NV[short_N.to(logits_NV.device), token] = -torch.inf


def _penalise_repetition(
    logits_NV: Tensor, penalty: float, prompt: Sequence[int], answers: Sequence[Sequence[int]]
) -> None:
    seen_NV = _counts(logits_NV, [[*prompt, *answer] for answer in answers]) > 0
    penalised_NV = torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty)
    logits_NV.copy_(torch.where(seen_NV, penalised_NV, logits_NV))


def _counts(logits_NV: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
    """How often each token occurs in each row's text."""
    count_NV = torch.zeros_like(logits_NV)
    for count_V, text in zip(count_NV, texts, strict=True):
        tokens = torch.tensor(text, dtype=torch.long, device=logits_NV.device)
        count_V.index_add_(0, tokens, torch.ones(len(text), device=logits_NV.device))
    return count_NV
