"""Thresholds below 1: drafts that the model would not have chosen, but finds likely enough.

A draft d is accepted while p(d) >= threshold * max p, at temperature 0. When sampling, it is
accepted with probability min(1, p(d) / threshold), and what replaces it has the model's
distribution without d. Both are what vLLM's own rule (the argmax; p(d), as the drafts are certain)
does with other logits, so the rule stays vLLM's and the logits of drafts are changed.

Shape suffixes: N drafts of all requests, V vocabulary.
"""

import torch
from torch import Tensor


def relax(logits_NV: Tensor, draft_N: Tensor, threshold_N: Tensor, is_greedy_N: Tensor) -> None:
    """Change the logits of drafts whose threshold is below 1, in place; others keep every bit.

    The logits are those that tokens are sampled from: after penalties, temperature and truncation.
    """
    row_X = (threshold_N < 1).nonzero().squeeze(-1)
    if not len(row_X):
        return
    logits_XV, draft_X1 = logits_NV[row_X], draft_N[row_X].long()[:, None]
    threshold_X1 = threshold_N[row_X][:, None]
    greedy_XV = _greedy(logits_XV, draft_X1, threshold_X1)
    sampled_XV = _sampled(logits_XV, draft_X1, threshold_X1)
    logits_NV[row_X] = torch.where(is_greedy_N[row_X][:, None], greedy_XV, sampled_XV)


def _greedy(logits_XV: Tensor, draft_X1: Tensor, threshold_X1: Tensor) -> Tensor:
    """A draft that passes becomes the argmax."""
    best_X1 = logits_XV.amax(dim=-1, keepdim=True)
    own_X1 = logits_XV.gather(-1, draft_X1)
    passes_X1 = ((own_X1 - best_X1).exp() >= threshold_X1) & own_X1.isfinite()
    return logits_XV.scatter(-1, draft_X1, torch.where(passes_X1, best_X1 + 1, own_X1))


def _sampled(logits_XV: Tensor, draft_X1: Tensor, threshold_X1: Tensor) -> Tensor:
    """A draft gets the probability with which it is accepted; others share what is left."""
    log_p_XV = logits_XV.log_softmax(dim=-1)
    log_p_X1 = log_p_XV.gather(-1, draft_X1)
    log_q_X1 = (log_p_X1 - threshold_X1.log()).clamp(max=0)
    # What others lose; if the draft is certain they lose all, and 0 / 0 must not become NaN.
    log_left_X1 = torch.log1p(-log_q_X1.exp()) - torch.log1p(-log_p_X1.exp())
    log_left_X1 = torch.where(log_q_X1 >= 0, -torch.inf, log_left_X1)
    # A draft that was ruled out stays so, at threshold 0 too.
    log_q_X1 = torch.where(log_p_X1.isfinite(), log_q_X1, -torch.inf)
    log_left_X1 = torch.where(log_p_X1.isfinite(), log_left_X1, torch.zeros_like(log_left_X1))
    return (log_p_XV + log_left_X1).scatter(-1, draft_X1, log_q_X1)
