"""Requests with a budget: at most a share of an answer's tokens differs from plain decoding.

A draft that plain decoding would not have taken is accepted if the model finds it likely enough
and the budget has room for it. When sampling, plain decoding takes a draft with the probability
that the model gives it. So the number that decides is drawn here, where what differs is counted,
and vLLM's own rule gets logits that leave it no choice.

Shape suffixes: D drafts of a request, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mars_ray.core.thresholds import Budget, Thresholds


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
            rule = _by_argmax if greedy else _by_chance
            agrees, passes = rule(logits_V, draft, threshold)
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
        """Forget a request."""
        self._disagreed.pop(request, None)
        self._differs.pop(request, None)


def _by_argmax(logits_V: Tensor, draft: int, threshold: float) -> tuple[bool, bool]:
    """Whether greedy decoding takes the draft, and whether it passes."""
    share = float((logits_V[draft] - logits_V.max()).exp())
    return int(logits_V.argmax()) == draft, share > 0 and share >= threshold


def _by_chance(logits_V: Tensor, draft: int, threshold: float) -> tuple[bool, bool]:
    """The same of sampling: by one number for both, so that whatever is taken passes."""
    p = float(logits_V.softmax(-1)[draft])
    drawn = float(torch.rand((), device=logits_V.device))
    return drawn < p, drawn * threshold < p
