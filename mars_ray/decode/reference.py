"""The oracle: one sequence, no cache, a full forward for every step, the rules as written.

Each mode is a function from what is committed to what one forward commits. The row at position t
predicts token t+1; W masks after the last real token c-1 stand at c .. c+W-1 and predict
c+1 .. c+W. A draft adapter makes the masks' rows, and no others.

Shape suffixes: N rows of one forward, M masks of a group, H hidden size, V
vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn
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
from mars_ray.core.accept import Measure, accepted_prefix, confidence, passes
from mars_ray.core.outcomes import likeliest_outcomes
from mars_ray.core.penalties import adjust
from mars_ray.core.sampling import scores
from mars_ray.core.verify import accepts
from mars_ray.decode.request import Completion, Request, check_request, window_of
from mars_ray.model.card import ModelCard
from mars_ray.model.draft_adapter import DraftAdapter
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
    adapter: DraftAdapter | None = None
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
        depths = [depth for _, masks in groups for depth in range(masks)]
        with _adapted(self.model, self.adapter, depths):
            hidden = hidden_states(
                self.model,
                torch.tensor([ids], device=device),
                torch.tensor([position], device=device),
                sees_NN[None, None].to(device),
            )
        first = len(self.tokens) - 1
        hidden_NH = hidden[0, first:]
        logits_NV = output_head(self.model)(hidden_NH).float()
        if self.card.mask_token_id is not None:
            # Never emitted, in any mode.
            logits_NV[:, self.card.mask_token_id] = -torch.inf
        # The row at position t predicts the token of position t + 1.
        position_N = torch.tensor(position[first:]) + 1
        before = [drafts[:count] for count in range(len(drafts) + 1)]
        before += [drafts[:after] for after, masks in groups for _ in range(masks)]
        scores_NV = self.scored(logits_NV, position_N, before)
        return _Rows(hidden_NH, logits_NV, scores_NV, position_N)

    def scored(self, logits_NV: Tensor, position_N: Tensor, before: list[list[int]]) -> Tensor:
        """By the request's sampling, behind so many guesses each."""
        adjusted_NV = logits_NV.clone()
        if self.sampling.changes_logits:
            answer = self.tokens[len(self.prompt) :]
            answers = [answer + drafts for drafts in before]
            places = [position - len(self.prompt) for position in position_N.tolist()]
            adjust(adjusted_NV, self.sampling, self.prompt, answers, places, self.stop_ids)
        return scores(adjusted_NV, self.sampling, position_N)


@contextmanager
def _adapted(
    model: PreTrainedModel, adapter: DraftAdapter | None, depths: list[int]
) -> Iterator[None]:
    """The last rows are masks of these depths, from 0: what the adapter makes of them."""
    if not adapter or not depths:
        yield
        return
    masks = len(depths)

    def embed(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return torch.cat([output[:, :-masks], adapter.mask_embedding_DH[depths][None]], dim=1)

    def add(down_RI: Tensor, up_OR: Tensor):
        def hook(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            added = adapter.card.scale * (inputs[0][:, -masks:] @ down_RI.t() @ up_OR.t())
            return torch.cat([output[:, :-masks], output[:, -masks:] + added], dim=1)

        return hook

    handles = [model.get_input_embeddings().register_forward_hook(embed)]
    for name, lora in adapter.lora.items():
        handles.append(model.get_submodule(name).register_forward_hook(add(*lora)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one forward: logits, and the scores whose argmax is the row's token."""

    hidden_NH: Tensor
    logits_NV: Tensor
    scores_NV: Tensor
    position_N: Tensor  # of the tokens to come

    @property
    def tokens(self) -> list[int]:
        return self.scores_NV.argmax(dim=-1).tolist()


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    card: ModelCard,
    request: Request,
    draft_model: PreTrainedModel | None = None,
    adapter: DraftAdapter | None = None,
) -> Completion:
    """Decode one request; `speculative` needs the draft model. Raises RequestError."""
    if adapter:
        card = replace(card, block_size=adapter.card.depths)
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
        adapter,
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
    tokens, confidences = _proposed(run, rows, slice(1, 1 + masks), [rows.tokens[0]], mode.measure)
    passed = passes(torch.tensor(confidences), mode.threshold, mode.measure)
    return [rows.tokens[0], *tokens[: accepted_prefix(passed)]]


def _proposed(
    run: _Run, rows: _Rows, masks: slice, before: list[int], measure: Measure | None
) -> tuple[list[int], list[float]]:
    """Tokens of a group of masks, `before` being all guesses and the token before them, and how
    sure each is: by the measure, or as a draft."""
    head = run.adapter.head if run.adapter else None
    logits_MV = rows.logits_NV[masks]
    if head is None:
        return rows.tokens[masks], confidence(logits_MV, measure or "probability").tolist()
    assert run.adapter
    vocabulary_VH = cast(nn.Linear, output_head(run.model)).weight
    tokens, confidences = [], []
    for index, (hidden_H, row_V) in enumerate(zip(rows.hidden_NH[masks], logits_MV, strict=True)):
        said = [*before, *tokens]
        previous_1H = run.model.get_input_embeddings()(torch.tensor(said[-1:]))
        corrected_1H = head.correct(hidden_H[None], previous_1H, torch.tensor([index + 1]))
        # Only the likeliest tokens of the row itself, and never what it may not say.
        candidates = row_V.topk(min(run.adapter.card.candidates, len(row_V))).indices
        candidates = candidates[row_V[candidates] > -torch.inf]
        corrected_1V = torch.full_like(row_V, -torch.inf)[None]
        corrected_1V[0, candidates] = (corrected_1H @ vocabulary_VH[candidates].t())[0].float()
        position_1 = rows.position_N[masks][index : index + 1]
        scores_1V = run.scored(corrected_1V, position_1, [said])
        tokens.append(int(scores_1V.argmax()))
        sure = confidence(corrected_1V, measure) if measure else scores_1V.softmax(dim=-1).amax()
        confidences.append(float(sure))
    return tokens, confidences


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
        before = [*drafts[:accepted], tokens[accepted]]
        run.drafts, run.draft_probabilities = _proposed(run, rows, masks, before, None)
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
