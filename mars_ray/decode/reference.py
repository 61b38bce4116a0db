"""The oracle: one sequence, no cache, a full forward for every step, the rules as written.

Each mode is a function from what is committed to what one forward commits. The row at position t
predicts token t+1; W masks after the last real token c-1 stand at c .. c+W-1 and predict
c+1 .. c+W.

Shape suffixes: N rows of one forward, V vocabulary, K drafts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.config.decode import (
    BlockCachedMode,
    ConfidenceMode,
    ExactMode,
    Mode,
    Sampling,
    VerifiedMode,
)
from mars_ray.core.accept import accepted_prefix, confidence, passes
from mars_ray.core.sampling import probabilities
from mars_ray.core.verify import greedy_accepts, residual, sampled_accepts
from mars_ray.decode.draws import (
    acceptance_draws,
    ban_token,
    draw_drafts,
    draw_from,
    draw_tokens,
)
from mars_ray.decode.request import Completion, Request, check_request, window_of
from mars_ray.model.card import ModelCard
from mars_ray.model.forward import hidden_states, output_head


@dataclass(slots=True)
class _Run:
    """One sequence under way."""

    model: PreTrainedModel
    card: ModelCard
    sampling: Sampling
    window: int
    prompt_length: int
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)
    draft_q_KV: Tensor | None = None

    def rows(self, drafts: list[int], masks: int) -> Tensor:
        """Logits from the last committed token's row on: (1 + drafts + masks, V), float32."""
        ids = self.tokens + drafts + [self.card.mask_token_id] * masks
        ids_1N = torch.tensor([ids], device=self.model.device)
        length = len(ids)
        position_1N = torch.arange(length, device=self.model.device).unsqueeze(0)
        causal = torch.ones(length, length, dtype=torch.bool, device=self.model.device).tril()
        hidden = hidden_states(self.model, ids_1N, position_1N, causal[None, None])
        logits = output_head(self.model)(hidden[0, len(self.tokens) - 1 :]).float()
        return ban_token(logits, self.card.mask_token_id)

    def positions(self, count: int, ahead: int = 0) -> Tensor:
        """Positions of the `count` tokens that start `ahead` places after the last committed."""
        start = len(self.tokens) + ahead
        return torch.arange(start, start + count)


@torch.no_grad()
def generate(model: PreTrainedModel, card: ModelCard, request: Request) -> Completion:
    """Decode one request. Raises RequestError."""
    check_request(request, model, card, max_context=model.config.max_position_embeddings)
    step = _STEPS[type(request.mode)]
    run = _Run(
        model,
        card,
        request.sampling,
        window_of(request.mode, card),
        len(request.prompt),
        list(request.prompt),
    )
    committed: list[int] = []
    token_forward: list[int] = []
    forwards = 0
    while True:
        new = step(run, request.mode)
        forwards += 1
        for token in new[: request.max_new_tokens - len(committed)]:
            committed.append(token)
            token_forward.append(forwards)
            if token in request.stop_ids:
                return _finish(request, committed, token_forward, "stop")
        if len(committed) == request.max_new_tokens:
            return _finish(request, committed, token_forward, "length")
        run.tokens += new


def _finish(request: Request, tokens: list[int], token_forward: list[int], reason) -> Completion:
    return Completion(request.id, tuple(tokens), tuple(token_forward), token_forward[-1], reason)


def _exact(run: _Run, mode: ExactMode) -> list[int]:
    return draw_tokens(run.rows([], 0), run.sampling, run.positions(1))


def _confidence(run: _Run, mode: ConfidenceMode) -> list[int]:
    """The AR row's token, then proposals while their confidence passes (paper, section 3.3).

    Confidence is that of the raw softmax; temperature changes only which token is drawn.
    """
    return _confident(run, mode, run.window)


def _block_cached(run: _Run, mode: BlockCachedMode) -> list[int]:
    """As `confidence`, but no step reaches over the end of its cache block."""
    done = len(run.tokens) - run.prompt_length
    left_in_block = mode.cache_block - done % mode.cache_block
    return _confident(run, mode, min(run.window, left_in_block - 1))


def _confident(run: _Run, mode: ConfidenceMode | BlockCachedMode, masks: int) -> list[int]:
    logits_NV = run.rows([], masks)
    tokens = draw_tokens(logits_NV, run.sampling, run.positions(1 + masks))
    passed = passes(confidence(logits_NV[1:], mode.measure), mode.threshold, mode.measure)
    return tokens[: 1 + accepted_prefix(passed)]


def _verified(run: _Run, mode: VerifiedMode) -> list[int]:
    """Drafts are checked by the causal rows before them; the first rejection is corrected, and
    only if there is none do the masks behind the drafts mean anything."""
    drafts = run.drafts
    count = len(drafts)
    logits_NV = run.rows(drafts, run.window)
    accepted = _accepted(run, mode, logits_NV[:count])
    last = accepted  # the row that predicts the token after the accepted drafts
    if accepted < count and run.sampling.temperature > 0:
        assert run.draft_q_KV is not None
        p_1V = probabilities(logits_NV[last : last + 1], run.sampling)
        rest_1V = residual(p_1V, run.draft_q_KV[last : last + 1])
        token = draw_from(rest_1V, run.sampling, run.positions(1, accepted))
    else:
        token = draw_tokens(logits_NV[last : last + 1], run.sampling, run.positions(1, accepted))
    run.drafts, run.draft_q_KV = [], None
    if accepted == count:
        run.drafts, run.draft_q_KV = draw_drafts(
            logits_NV[count + 1 :], run.sampling, run.positions(run.window, count + 1)
        )
    return drafts[:accepted] + token


def _accepted(run: _Run, mode: VerifiedMode, logits_KV: Tensor) -> int:
    if not run.drafts:
        return 0
    draft_K = torch.tensor(run.drafts, device=logits_KV.device)
    if run.sampling.temperature == 0:
        return accepted_prefix(greedy_accepts(logits_KV, draft_K, mode.threshold))
    assert run.draft_q_KV is not None
    p_KV = probabilities(logits_KV, run.sampling)
    draws_K = acceptance_draws(run.sampling, run.positions(len(run.drafts)))
    accepts = sampled_accepts(p_KV, run.draft_q_KV, draft_K, mode.threshold, draws_K)
    return accepted_prefix(accepts)


_STEPS: dict[type[Mode], Callable[..., list[int]]] = {
    ExactMode: _exact,
    ConfidenceMode: _confidence,
    BlockCachedMode: _block_cached,
    VerifiedMode: _verified,
}
