"""The oracle: one sequence, no cache, a full forward for every step, the rules as written.

Each mode is a function from what is committed to what one forward commits. The row at position t
predicts token t+1; W masks after the last real token c-1 stand at c .. c+W-1 and predict
c+1 .. c+W.

Shape suffixes: N rows of one forward, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.config.decode import (
    BlockCachedMode,
    ConfidenceMode,
    ExactMode,
    JacobiMode,
    Mode,
    Sampling,
    SpeculativeMode,
    VerifiedMode,
)
from mars_ray.core.accept import accepted_prefix, confidence, passes
from mars_ray.core.outcomes import likeliest_outcomes
from mars_ray.core.penalties import adjust
from mars_ray.core.sampling import scores
from mars_ray.core.verify import accepts
from mars_ray.decode.request import Completion, Request, check_request, window_of
from mars_ray.model.card import ModelCard
from mars_ray.model.forward import hidden_states, output_head

_PENALTIES = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_new_tokens",
)


@dataclass(slots=True)
class _Run:
    """One sequence under way."""

    model: PreTrainedModel
    card: ModelCard
    sampling: Sampling
    window: int
    prompt: tuple[int, ...]
    stop_ids: frozenset[int]
    tokens: list[int]
    draft_model: PreTrainedModel | None = None
    drafts: list[int] = field(default_factory=list)
    draft_probabilities: list[float] = field(default_factory=list)

    def rows(self, drafts: list[int], groups: list[tuple[int, int]]) -> "_Rows":
        """The rows from that of the last committed token on, for [tokens | drafts | masks].

        A group (after, masks) of masks stands behind so many drafts and sees nothing of the others.
        """
        real, device = self.tokens + drafts, self.model.device
        total = len(real) + sum(masks for _, masks in groups)
        ids = real + [self.card.mask_token_id or 0] * (total - len(real))
        position = list(range(len(real)))
        sees_NN = torch.ones(total, total, dtype=torch.bool).tril()
        for after, masks in groups:
            row, start = len(position), len(self.tokens) + after
            sees_NN[row : row + masks, start:row] = False
            position += range(start, start + masks)
        hidden = hidden_states(
            self.model,
            torch.tensor([ids], device=device),
            torch.tensor([position], device=device),
            sees_NN[None, None].to(device),
        )
        first = len(self.tokens) - 1
        logits_NV = output_head(self.model)(hidden[0, first:]).float()
        if self.card.mask_token_id is not None:
            # Never emitted, in any mode.
            logits_NV[:, self.card.mask_token_id] = -torch.inf
        # The row at position t predicts the token of position t + 1.
        position_N = torch.tensor(position[first:]) + 1
        before = [drafts[:count] for count in range(len(drafts) + 1)]
        before += [drafts[:after] for after, masks in groups for _ in range(masks)]
        return self._scored(logits_NV, position_N, before)

    def _scored(self, logits_NV: Tensor, position_N: Tensor, before: list[list[int]]) -> "_Rows":
        adjusted_NV = logits_NV.clone()
        if self.sampling.changes_logits:
            answer = self.tokens[len(self.prompt) :]
            answers = [answer + drafts for drafts in before]
            places = [position - len(self.prompt) for position in position_N.tolist()]
            adjust(adjusted_NV, self.sampling, self.prompt, answers, places, self.stop_ids)
        return _Rows(logits_NV, scores(adjusted_NV, self.sampling, position_N))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one forward: logits, and the scores whose argmax is the row's token."""

    logits_NV: Tensor
    scores_NV: Tensor

    @property
    def tokens(self) -> list[int]:
        return self.scores_NV.argmax(dim=-1).tolist()


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    card: ModelCard,
    request: Request,
    draft_model: PreTrainedModel | None = None,
) -> Completion:
    """Decode one request; `speculative` needs the draft model. Raises RequestError."""
    check_request(request, model, card, max_context=model.config.max_position_embeddings)
    step = _STEPS[type(request.mode)]
    run = _Run(
        model,
        card,
        request.sampling,
        window_of(request.mode, card),
        request.prompt,
        request.stop_ids,
        list(request.prompt),
        draft_model,
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
    return run.rows([], []).tokens


def _confidence(run: _Run, mode: ConfidenceMode) -> list[int]:
    """The AR row's token, then proposals while their confidence passes (paper, section 3.3).

    Confidence is that of the raw softmax; temperature changes only which token is drawn.
    """
    return _confident(run, mode, run.window)


def _block_cached(run: _Run, mode: BlockCachedMode) -> list[int]:
    """As `confidence`, but no step reaches over the end of its cache block."""
    done = len(run.tokens) - len(run.prompt)
    left_in_block = mode.cache_block - done % mode.cache_block
    return _confident(run, mode, min(run.window, left_in_block - 1))


def _confident(run: _Run, mode: ConfidenceMode | BlockCachedMode, masks: int) -> list[int]:
    rows = run.rows([], [(0, masks)])
    passed = passes(confidence(rows.logits_NV[1:], mode.measure), mode.threshold, mode.measure)
    return rows.tokens[: 1 + accepted_prefix(passed)]


def _verified(run: _Run, mode: VerifiedMode) -> list[int]:
    """Drafts are checked by the causal rows before them, the first rejection is corrected, and the
    masks that stand behind just so many drafts say the next drafts."""
    return _verify(run, mode.threshold, mode.groups or 1)


def _speculative(run: _Run, mode: SpeculativeMode) -> list[int]:
    """Behind what the masks said stand the draft model's tokens; every outcome gets masks."""
    if len(run.tokens) > len(run.prompt):
        _add_drafts(run, mode.draft_tokens)
    return _verify(run, mode.threshold, mode.groups or len(run.drafts) + 1)


def _add_drafts(run: _Run, count: int) -> None:
    """Plain decoding by the draft model, with the target's seed and no penalties."""
    assert run.draft_model
    penalties = Sampling().model_dump(include=set(_PENALTIES))
    sampling = run.sampling.model_copy(update=penalties)
    own = replace(run, model=run.draft_model, sampling=sampling, tokens=run.tokens + run.drafts)
    for _ in range(count):
        rows = own.rows([], [])
        token = rows.tokens[0]
        own.tokens.append(token)
        run.drafts.append(token)
        run.draft_probabilities.append(float(rows.logits_NV[0].softmax(dim=-1)[token]))


def _verify(run: _Run, threshold: float, groups: int) -> list[int]:
    drafts = run.drafts
    outcomes = [len(drafts)]  # one group stands behind all drafts, whatever their probabilities
    if groups > 1:
        outcomes = likeliest_outcomes(run.draft_probabilities, groups)
    rows = run.rows(drafts, [(after, run.window) for after in outcomes])
    count, tokens = len(drafts), rows.tokens
    draft_K = torch.tensor(drafts, dtype=torch.long, device=rows.scores_NV.device)
    accepted = accepted_prefix(accepts(rows.scores_NV[:count], draft_K, threshold))
    run.drafts, run.draft_probabilities = [], []
    if accepted in outcomes:
        start = count + 1 + outcomes.index(accepted) * run.window
        masks = slice(start, start + run.window)
        run.drafts = tokens[masks]
        run.draft_probabilities = confidence(rows.logits_NV[masks], "probability").tolist()
    return [*drafts[:accepted], tokens[accepted]]


def _jacobi(run: _Run, mode: JacobiMode) -> list[int]:
    """Guesses are accepted while they are what the rows before them say; the rest are replaced by
    what their rows say, and the last one is repeated where nothing is known yet."""
    drafts = run.drafts
    tokens = run.rows(drafts, []).tokens
    agree = [token == draft for token, draft in zip(tokens, drafts, strict=False)]
    accepted = [*agree, False].index(False)
    known = tokens[accepted + 1 :]
    filler = known[-1] if known else tokens[accepted]
    run.drafts = known + [filler] * (mode.guesses - len(known))
    return [*drafts[:accepted], tokens[accepted]]


_STEPS: dict[type[Mode], Callable[..., list[int]]] = {
    ExactMode: _exact,
    ConfidenceMode: _confidence,
    BlockCachedMode: _block_cached,
    VerifiedMode: _verified,
    JacobiMode: _jacobi,
    SpeculativeMode: _speculative,
}
