"""The proposals of the masks behind a step's outcome.

Without a sequential head each mask proposes by itself. With a head (`core.draft_head`) the token
before each mask is known: that of the outcome's row, or the proposal just made. So the head works
depth by depth, for all sequences together, and only on each row's likeliest tokens.

The first mask may propose several tokens, each the first of a branch, which continues as a chain.
Without a head the chain is the same in all; with a head it depends on the branch's own tokens.

Shape suffixes: M rows of masks, L branches of all sequences, X those of one depth, D depths,
C candidates, H hidden size, V vocabulary, S sequences with several branches, A alternatives.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from mars_ray.core.acceptance import Measure, confidence
from mars_ray.core.draft_head import DraftHead, likeliest
from mars_ray.core.penalties import adjust
from mars_ray.core.tree import fan
from mars_ray.decode.adapter import FusedAdapter
from mars_ray.decode.attention.backend import Backend
from mars_ray.decode.logits import NOT_A_NUMBER, Block, adjust_all, best, sample, score, upload
from mars_ray.decode.strategies.base import Masks, Proposals
from mars_ray.errors import EngineError


def choose_drafts(
    backend: Backend,
    rows: Several[int],
    logits_MV: Tensor,
    position_M: np.ndarray,
    masks: Several[Masks],
) -> list[Proposals]:
    """Proposals of each sequence's masks, which are these rows of the forward; `position_M` holds
    the predicted tokens' positions."""
    adapter = backend.adapter
    if adapter and adapter.head:
        if (found := backend.drafts(masks, rows, logits_MV, position_M)) is not None:
            said = zip(*found, strict=True)
            counts = [each.branches_of(adapter.candidates) for each in masks]
            return [
                _of_branches(each, islice(said, count))
                for each, count in zip(masks, counts, strict=True)
            ]
        hidden_MH = backend.hidden(rows)
        drafts = _Drafts(backend, adapter, adapter.head, hidden_MH, logits_MV, position_M, masks)
        return drafts.by_head()
    return _by_themselves(backend, logits_MV, position_M, masks)


def _by_themselves(
    backend: Backend, logits_MV: Tensor, position_M: np.ndarray, masks: Several[Masks]
) -> list[Proposals]:
    measures: list[Measure] = [each.plan.measure or "probability" for each in masks]
    measured = {measure: confidence(logits_MV, measure).tolist() for measure in set(measures)}
    log_p = [_log_p(logits_MV, each) for each in masks]
    blocks = [
        Block(
            each.sequence.request,
            each.own,
            [each.answer] * each.count if each.sequence.request.sampling.changes_logits else [],
        )
        for each in masks
        if each.count
    ]
    several = [each for each in masks if each.branches > 1 and each.count]
    first = torch.tensor([each.own.start for each in several], dtype=torch.long)
    first_S = upload(first, logits_MV.device)
    p_SV = logits_MV[first_S].softmax(dim=-1)
    nothing_M = np.zeros(0, np.int64)
    if several:
        score(logits_MV, blocks, position_M)
        best_M, _ = best(logits_MV, nothing_M, nothing_M)
    else:
        adjust_all(logits_MV, blocks, position_M)
        best_M, _ = backend.choose(logits_MV, blocks, position_M, nothing_M, nothing_M)
    tokens = best_M.tolist()
    if NOT_A_NUMBER in tokens:
        raise EngineError("the model gives numbers that are none")
    others = iter(_others(logits_MV[first_S], p_SV, several))
    made = []
    for each, measure, log_p_NV in zip(masks, measures, log_p, strict=True):
        own, sure = tokens[each.own], measured[measure][each.own]
        branches = [(own, sure)]
        if each.branches > 1 and own:
            branches += [([t, *own[1:]], [p, *sure[1:]]) for t, p in next(others)]
        made.append(_proposals(branches, log_p_NV))
    return made


def _others(
    scores_SV: Tensor, p_SV: Tensor, several: Several[Masks]
) -> list[list[tuple[int, float]]]:
    """Each row's next best tokens after its best one, with their probabilities in that row."""
    if not several:
        return []
    most = min(max(each.branches for each in several), scores_SV.shape[-1])
    top_SA = scores_SV.topk(most, dim=-1)
    p_SA = p_SV.gather(-1, top_SA.indices).masked_fill(top_SA.values == -torch.inf, 0.0)
    pairs = zip(several, top_SA.indices.tolist(), p_SA.tolist(), strict=True)
    return [
        list(zip(tokens, numbers, strict=True))[1 : each.branches]
        for each, tokens, numbers in pairs
    ]


def _proposals(branches: list[tuple[list[int], list[float]]], log_p_NV: Tensor | None) -> Proposals:
    """Branches of the same depth with their confidences, without those whose first token has
    probability 0."""
    if not branches:
        return Proposals(log_p_NV=log_p_NV)
    kept = [each for index, each in enumerate(branches) if index == 0 or each[1][0] > 0]
    return Proposals(
        list(chain.from_iterable(tokens for tokens, _ in kept)),
        list(chain.from_iterable(numbers for _, numbers in kept)),
        fan(len(kept), len(kept[0][0])),
        log_p_NV,
    )


def _of_branches(
    masks: Masks, said: Iterable[tuple[list[int], list[float]]], log_p_NV: Tensor | None = None
) -> Proposals:
    chains = [(text[: masks.count], sure[: masks.count]) for text, sure in said]
    return _proposals(chains, log_p_NV)


def _log_p(logits_MV: Tensor, masks: Masks) -> Tensor | None:
    if masks.sequence.request.logprobs is None:
        return None
    return logits_MV[masks.own].log_softmax(dim=-1)


class _Drafts:
    """One step's drafts by the sequential head."""

    def __init__(
        self,
        backend: Backend,
        adapter: FusedAdapter,
        head: DraftHead,
        hidden_MH: Tensor,
        logits_MV: Tensor,
        position_M: np.ndarray,
        masks: Several[Masks],
    ) -> None:
        self._backend, self._head = backend, head
        self._hidden_MH, self._logits_MV, self._position_M = hidden_MH, logits_MV, position_M
        self._masks = masks
        self._candidate_MC = likeliest(logits_MV, adapter.candidates)
        likeliest_MC = logits_MV.gather(-1, self._candidate_MC)
        # Tokens that are never emitted must not be candidates, as they could in a small vocabulary.
        self._banned_MC = torch.zeros_like(likeliest_MC).masked_fill_(
            likeliest_MC == -torch.inf, -torch.inf
        )

    def by_head(self) -> list[Proposals]:
        """Proposals of each sequence's masks, found depth by depth."""
        device = self._hidden_MH.device
        counts = [each.count for each in self._masks]
        most = self._candidate_MC.shape[1]
        branches = [each.branches_of(most) for each in self._masks]
        member_L = [index for index, own in enumerate(branches) for _ in range(own)]
        rank_L = torch.tensor([rank for own in branches for rank in range(own)])
        # Each branch's tokens, after the token of the outcome's row.
        text_LD = torch.zeros((len(member_L), 1 + max(counts)), dtype=torch.long, device=device)
        before = torch.tensor([self._masks[index].token for index in member_L])
        text_LD[:, 0] = upload(before, device)
        number_LD = torch.zeros((len(member_L), max(counts)), device=device)
        for depth in range(max(counts)):
            own = [branch for branch, index in enumerate(member_L) if counts[index] > depth]
            own_X = upload(torch.tensor(own), device)
            members = [member_L[branch] for branch in own]
            rank_X = rank_L[own] if depth == 0 else torch.zeros(len(own), dtype=torch.long)
            token_X, number_X = self._choose(members, text_LD[own_X, : depth + 1], rank_X)
            text_LD[own_X, depth + 1], number_LD[own_X, depth] = token_X, number_X
        said = zip(text_LD[:, 1:].tolist(), number_LD.nan_to_num(0.0).tolist(), strict=True)
        made = []
        for each, own in zip(self._masks, branches, strict=True):
            made.append(_of_branches(each, islice(said, own), _log_p(self._logits_MV, each)))
        return made

    def _choose(
        self, members: list[int], before_XD: Tensor, rank_X: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Proposals of some branches at one depth, and the confidence of each.

        `members` are the branches' sequences. A branch takes its mask's likeliest token, or the one
        of the given rank.
        """
        depth = before_XD.shape[1] - 1
        rows = [self._masks[index].own.start + depth for index in members]
        position_X = self._position_M[rows]
        row_X = upload(torch.tensor(rows), self._hidden_MH.device)
        corrected_XH = self._head.correct(
            self._hidden_MH[row_X],
            self._backend.embed(before_XD[:, -1]),
            torch.full_like(row_X, depth + 1),
        )
        candidate_XC = self._candidate_MC[row_X]
        logits_XC = self._backend.candidate_logits(corrected_XH, candidate_XC)
        logits_XC += self._banned_MC[row_X]
        numbers: dict[Measure | None, Tensor] = {}
        measures: list[Measure | None] = [self._masks[index].plan.measure for index in members]
        for measure in set(measures):
            if measure:
                numbers[measure] = confidence(logits_XC, measure)
        self._note_and_adjust(members, before_XD, candidate_XC, logits_XC)
        blocks = [
            Block(self._masks[index].sequence.request, slice(place, place + 1))
            for place, index in enumerate(members)
        ]
        sample(logits_XC, blocks, position_X, candidate_XC)
        most = int(rank_X.max())
        chosen_X1 = logits_XC.argmax(dim=-1, keepdim=True)
        if most:
            rank_X1 = upload(rank_X, row_X.device)[:, None]
            chosen_X1 = logits_XC.topk(most + 1, dim=-1).indices.gather(-1, rank_X1)
        numbers[None] = logits_XC.softmax(dim=-1).gather(-1, chosen_X1).squeeze(-1)
        number_X = torch.stack([numbers[measure][at] for at, measure in enumerate(measures)])
        return candidate_XC.gather(-1, chosen_X1).squeeze(-1), number_X

    def _note_and_adjust(
        self, members: list[int], before_XD: Tensor, candidate_XC: Tensor, logits_XC: Tensor
    ) -> None:
        """Keep the requested logits of one depth; then apply penalties and the like."""
        depth, noted = before_XD.shape[1] - 1, set()
        for place, index in enumerate(members):
            each = self._masks[index]
            if each.sequence.request.logprobs is not None and index not in noted:
                row_V = self._logits_MV[each.own.start + depth]
                row_V.scatter_(0, candidate_XC[place], logits_XC[place])
                noted.add(index)  # only for the first branch
            if each.sequence.request.sampling.changes_logits:
                before = before_XD[place].tolist()
                logits_XC[place] = self._adjusted(
                    each, before, candidate_XC[place], logits_XC[place]
                )

    def _adjusted(
        self, masks: Masks, before: list[int], candidate_C: Tensor, logits_C: Tensor
    ) -> Tensor:
        """The logits of a row after penalties and the like, with the chosen drafts before it."""
        row_1V = self._logits_MV.new_full((1, self._logits_MV.shape[1]), -torch.inf)
        row_1V[0, candidate_C] = logits_C
        request, answer = masks.sequence.request, [*masks.answer, *before]
        adjust(row_1V, request.sampling, request.prompt, [answer], [len(answer)], request.stop_ids)
        return row_1V[0, candidate_C]
