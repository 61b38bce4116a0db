"""The oracle: one sequence, no cache, a full forward for every step, the rules as written.

Each mode is a function from the committed tokens to those that one forward commits. The row at
position t predicts token t+1; W masks after the last real token c-1 stand at c .. c+W-1 and predict
c+1 .. c+W. A draft adapter computes the masks' rows, and no others.

Shape suffixes: N rows of one forward, M masks of a group, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import (
    BlockCachedMode,
    ConfidenceMode,
    ExactMode,
    JacobiMode,
    Mode,
    VerifiedMode,
)
from mars_ray.core.acceptance import Measure, confidence, passes
from mars_ray.core.sampling import adjust, scores
from mars_ray.core.tree import chain, first_chain, likeliest_outcomes, path_to
from mars_ray.decode.request import Completion, Request, check_request, window_of
from mars_ray.model.directory import ModelCard
from mars_ray.model.draft_adapter import DraftAdapter
from mars_ray.model.forward import hidden_states, output_head


def accepted_prefix(passed_N: Tensor) -> int:
    """How many proposals are accepted left to right: the length of the leading run of True."""
    return int(passed_N.long().cumprod(dim=-1).sum())


def accepts(scores_KV: Tensor, draft_K: Tensor, threshold: float) -> Tensor:
    """Whether each draft passes, bool (K,); scores are those of `core.sampling.scores`.

    At threshold 1 the draft must be the argmax itself, so that a tie cannot change the output.
    Below 1, its score may lie log(1 / threshold) under the largest: at temperature 0 that means
    p(d) >= threshold * max p; when sampling, the same holds for probabilities times their noise.
    """
    if threshold == 1:
        return scores_KV.argmax(dim=-1) == draft_K
    draft_score_K = scores_KV.gather(-1, draft_K.unsqueeze(-1)).squeeze(-1)
    return (draft_score_K - scores_KV.amax(dim=-1)).exp() >= threshold


@dataclass(slots=True)
class _Run:
    """One sequence while it is decoded."""

    model: PreTrainedModel
    card: ModelCard
    sampling: Sampling
    window: int
    prompt: tuple[int, ...]
    stop_ids: frozenset[int]
    tokens: list[int]
    adapter: DraftAdapter | None = None
    drafts: list[int] = field(default_factory=list)
    draft_probabilities: list[float] = field(default_factory=list)
    draft_parents: list[int] = field(default_factory=list)

    def rows(
        self,
        drafts: list[int],
        groups: list[tuple[int, int]],
        parents: list[int] | None = None,
    ) -> "_Rows":
        """The rows of [tokens | drafts | masks], from that of the last committed token on.

        A draft sees the drafts on the path to it (`core.tree`); without parents they are a chain.
        A group (after, masks) stands behind the node `after`, and sees the drafts on its path.
        """
        parents = chain(len(drafts)) if parents is None else parents
        paths = [path_to(parents, node) for node in range(len(drafts) + 1)]
        real, device = self.tokens + drafts, self.model.device
        total = len(real) + sum(masks for _, masks in groups)
        ids = real + [self.card.mask_token_id or 0] * (total - len(real))
        committed = len(self.tokens)
        position = list(range(committed))
        sees_NN = torch.ones(total, total, dtype=torch.bool).tril()

        def stand_behind(path: list[int], rows: int) -> None:
            """Let the next rows see the tokens, a path's drafts, and each other causally."""
            row = len(position)
            sees_NN[row : row + rows, committed:row] = False
            for node in path:
                sees_NN[row : row + rows, committed + node - 1] = True
            position.extend(range(committed + len(path), committed + len(path) + rows))

        for path in paths[1:]:
            stand_behind(path[:-1], 1)
        for after, masks in groups:
            stand_behind(paths[after], masks)
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
            # The mask token is never emitted, in any mode.
            logits_NV[:, self.card.mask_token_id] = -torch.inf
        # The row at position t predicts the token of position t + 1.
        position_N = torch.tensor(position[first:]) + 1
        before = [[drafts[node - 1] for node in path] for path in paths]
        before += [before[after] for after, masks in groups for _ in range(masks)]
        scores_NV = self.scored(logits_NV, position_N, before)
        return _Rows(hidden_NH, logits_NV, scores_NV, position_N)

    def scored(self, logits_NV: Tensor, position_N: Tensor, before: list[list[int]]) -> Tensor:
        """Scores by the request's sampling; `before` holds the guesses before each row."""
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
    """A context in which the adapter computes the last rows, masks of these depths (from 0)."""
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
    """Rows of one forward: their logits, and scores whose argmax is the row's token."""

    hidden_NH: Tensor
    logits_NV: Tensor
    scores_NV: Tensor
    position_N: Tensor  # positions of the predicted tokens

    @property
    def tokens(self) -> list[int]:
        return self.scores_NV.argmax(dim=-1).tolist()


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    card: ModelCard,
    request: Request,
    adapter: DraftAdapter | None = None,
) -> Completion:
    """Decode one request. Raises RequestError."""
    if adapter:
        card = replace(card, block_size=adapter.card.depths)
    check_request(
        request, model.config.vocab_size, card, max_context=model.config.max_position_embeddings
    )
    step = _STEPS[type(request.mode)]
    run = _Run(
        model,
        card,
        request.sampling,
        window_of(request.mode, card),
        request.prompt,
        request.stop_ids,
        list(request.prompt),
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

    The confidence is that of the raw softmax; temperature only changes which token is drawn. At
    threshold 1 there are no proposals.
    """
    return _confident(run, mode, 0 if mode.is_plain_at(mode.threshold) else run.window)


def _block_cached(run: _Run, mode: BlockCachedMode) -> list[int]:
    """As `_confidence`, but no step reaches over the end of its cache block."""
    done = len(run.tokens) - len(run.prompt)
    left_in_block = mode.cache_block - done % mode.cache_block
    return _confident(run, mode, min(run.window, left_in_block - 1))


def _confident(run: _Run, mode: ConfidenceMode | BlockCachedMode, masks: int) -> list[int]:
    rows = run.rows([], [(0, masks)])
    tokens, confidences = _proposed(run, rows, slice(1, 1 + masks), [rows.tokens[0]], mode.measure)
    passed = [passes(number, mode.threshold, mode.measure) for number in confidences]
    return [rows.tokens[0], *tokens[: accepted_prefix(torch.tensor(passed))]]


def _proposed(
    run: _Run,
    rows: _Rows,
    masks: slice,
    before: list[int],
    measure: Measure | None,
    first: tuple[int, float] | None = None,
) -> tuple[list[int], list[float]]:
    """Tokens of a group of masks, with confidences by the measure or as drafts. `before` is all
    guesses and the token before them; `first` replaces the first mask's proposal."""
    count = len(rows.logits_NV[masks])
    if run.adapter is None or run.adapter.head is None:
        tokens = rows.tokens[masks]
        confidences = confidence(rows.logits_NV[masks], measure or "probability").tolist()
        if first and count:
            tokens[0], confidences[0] = first
        return tokens, confidences
    tokens, confidences = ([first[0]], [first[1]]) if first and count else ([], [])
    for index in range(len(tokens), count):
        corrected_1V, scores_1V = _by_head(run, rows, masks.start + index, index, before + tokens)
        tokens.append(int(scores_1V.argmax()))
        sure = confidence(corrected_1V, measure) if measure else scores_1V.softmax(dim=-1).amax()
        confidences.append(float(sure))
    return tokens, confidences


def _by_head(
    run: _Run, rows: _Rows, row: int, depth: int, said: list[int]
) -> tuple[Tensor, Tensor]:
    """Logits and scores of a mask's row by the sequential head, which knows the tokens before."""
    assert run.adapter
    assert run.adapter.head
    row_V = rows.logits_NV[row]
    vocabulary_VH = cast(nn.Linear, output_head(run.model)).weight
    previous_1H = run.model.get_input_embeddings()(torch.tensor(said[-1:]))
    corrected_1H = run.adapter.head.correct(
        rows.hidden_NH[row][None], previous_1H, torch.tensor([depth + 1])
    )
    # Only the row's own likeliest tokens, and never a banned one.
    candidates = row_V.topk(min(run.adapter.card.candidates, len(row_V))).indices
    candidates = candidates[row_V[candidates] > -torch.inf]
    corrected_1V = torch.full_like(row_V, -torch.inf)[None]
    corrected_1V[0, candidates] = (corrected_1H @ vocabulary_VH[candidates].t())[0].float()
    return corrected_1V, run.scored(corrected_1V, rows.position_N[row : row + 1], [said])


def _alternatives(
    run: _Run, rows: _Rows, masks: slice, before: list[int]
) -> list[tuple[int, float]]:
    """The first mask's possible tokens, the best first, and the probability of each."""
    if not len(rows.logits_NV[masks]):
        return []
    scores_V = rows.scores_NV[masks.start]
    p_V = rows.logits_NV[masks.start].softmax(dim=-1)
    if run.adapter and run.adapter.head:
        _, scores_1V = _by_head(run, rows, masks.start, 0, before)
        scores_V = scores_1V[0]
        p_V = scores_V.softmax(dim=-1)
    tokens = scores_V.argsort(descending=True).tolist()
    return [
        (token, float(p_V[token]))
        for token in tokens
        if scores_V[token] > -torch.inf and p_V[token] > 0
    ]


def _verified(run: _Run, mode: VerifiedMode) -> list[int]:
    """Drafts are checked by the causal rows before them, the first rejection is corrected, and the
    masks behind the last accepted draft give the next drafts."""
    return _verify(run, mode.threshold, mode.groups_of(run.window), mode.branches_of(run.window))


def _verify(run: _Run, threshold: float, groups: int, branches: int = 1) -> list[int]:
    drafts, parents = run.drafts, run.draft_parents
    # One group stands behind the whole first chain, whatever the probabilities.
    outcomes = [first_chain(parents)]
    if groups > 1:
        outcomes = likeliest_outcomes(run.draft_probabilities, groups, parents)
    rows = run.rows(drafts, [(after, run.window) for after in outcomes], parents)
    node, said = 0, []
    while (child := _follower(run, rows, node, threshold)) is not None:
        node = child
        said.append(drafts[node - 1])
    said.append(rows.tokens[node])
    run.drafts, run.draft_probabilities, run.draft_parents = [], [], []
    if node in outcomes:
        start = len(drafts) + 1 + outcomes.index(node) * run.window
        _draft(run, rows, slice(start, start + run.window), said, branches)
    return said


def _follower(run: _Run, rows: _Rows, node: int, threshold: float) -> int | None:
    """The draft accepted behind a node: the row's token, or else the best one that passes."""
    scores_V = rows.scores_NV[node]
    children = [n for n, parent in enumerate(run.draft_parents, start=1) if parent == node]
    children.sort(key=lambda child: float(scores_V[run.drafts[child - 1]]), reverse=True)
    draft_K = torch.tensor([run.drafts[child - 1] for child in children], dtype=torch.long)
    scores_KV = scores_V.expand(len(children), -1)
    for wanted in (1.0, threshold):
        passed = accepts(scores_KV, draft_K.to(scores_V.device), wanted).tolist()
        if any(passed):
            return children[passed.index(True)]
    return None


def _draft(run: _Run, rows: _Rows, masks: slice, before: list[int], branches: int) -> None:
    """Set the next drafts: a group's proposals, and the same with every alternative for the first
    of them."""
    firsts = [None, *_alternatives(run, rows, masks, before)[1:branches]]
    for first in firsts:
        tokens, confidences = _proposed(run, rows, masks, before, None, first)
        start = len(run.drafts)
        run.drafts += tokens
        run.draft_probabilities += confidences
        run.draft_parents += [start + level if level else 0 for level in range(len(tokens))]


def _jacobi(run: _Run, mode: JacobiMode) -> list[int]:
    """Guesses are accepted while they match the predictions of the rows before them. The rest are
    replaced by those predictions; where there is none yet, the last token is repeated."""
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
}
