"""Drafts that the model would not have chosen, but finds likely enough: thresholds and budgets.

A draft d is accepted while p(d) >= threshold * max p, at temperature 0. When sampling, it is
accepted with probability min(1, p(d) / threshold), and what replaces it has the model's
distribution without d. Both are what vLLM's own rule (the argmax; p(d), as the drafts are certain)
does with other logits, so the rule stays vLLM's and the logits of drafts are changed.

With a budget, at most a share of an answer's tokens differs from plain decoding: such a draft is
accepted if the budget has room for it. When sampling, plain decoding takes a draft with the
probability that the model gives it. So the number that decides is drawn here, where what differs is
counted, and vLLM's own rule gets logits that leave it no choice.

Shape suffixes: N drafts of all requests, D drafts of a request, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mars_ray.core.thresholds import Budget, Thresholds


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


@dataclass(frozen=True, slots=True)
class Spender:
    """A request with a budget, in a step that checks drafts of it."""

    request: str
    budget: Budget
    tokens: int  # of its answer before the step
    first: int  # its first draft among those of all requests
    drafts: int


class Budgets:
    """What running requests have spent of their budgets, and the thresholds that follow from it."""

    def __init__(self) -> None:
        self._thresholds = Thresholds()
        self._disagreed: dict[str, int] = {}
        # Of the step under way: of each draft that may be accepted, whether it differs.
        self._differs: dict[str, tuple[Budget, list[bool]]] = {}

    def disagreed(self, request: str) -> int:
        """Tokens of an answer that plain decoding would not have taken."""
        return self._disagreed.get(request, 0)

    def decide(
        self, spender: Spender, logits_DV: Tensor, drafts: Sequence[int], greedy: bool
    ) -> None:
        """Change the logits of a request's drafts, in place: those that it may have are certain,
        and the one behind them is as the model wants it, or impossible."""
        threshold = self._thresholds.of(spender.budget)
        disagreed, differs = self.disagreed(spender.request), list[bool]()
        for depth, (logits_V, draft) in enumerate(zip(logits_DV, drafts, strict=True)):
            if greedy:
                share = float((logits_V[draft] - logits_V.max()).exp())
                agrees, passes = int(logits_V.argmax()) == draft, share >= threshold and share > 0
            else:  # by one number for both, so that whatever is taken passes
                share = float(logits_V.softmax(-1)[draft])
                drawn = float(torch.rand((), device=logits_V.device))
                agrees, passes = drawn < share, drawn * threshold < share
            room = spender.budget.allows(disagreed, spender.tokens + depth + 1)
            if not agrees and not (passes and room):
                if not greedy:
                    logits_V[draft] = -torch.inf
                break
            logits_V.fill_(-torch.inf)
            logits_V[draft] = 0.0
            differs.append(not agrees)
            disagreed += not agrees
        self._differs[spender.request] = spender.budget, differs

    def settle(self, requests: Iterable[str], sampled: Iterable[Sequence[int]]) -> None:
        """Count what the step's tokens have spent, and learn from it."""
        for request, tokens in zip(requests, sampled, strict=True):
            budget, differs = self._differs.pop(request, (None, []))
            if budget is None:
                continue
            # The last token is the model's own.
            spent = sum(differs[: max(0, len(tokens) - 1)])
            self._disagreed[request] = self.disagreed(request) + spent
            self._thresholds.observe(budget, len(tokens), spent)

    def ended(self, request: str) -> None:
        self._disagreed.pop(request, None)
        self._differs.pop(request, None)
