"""What the masks behind a step's outcome propose.

Without a sequential head each mask proposes by itself. With one (`core.draft_head`) the token
before each is known: that of the outcome's row, or the proposal just made. So the head takes one
depth after the other, of all sequences together, and only each row's likeliest tokens.

Shape suffixes: M rows of masks, X those of one depth, C candidates, H hidden size, V vocabulary.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mars_ray.core.accept import Measure, confidence
from mars_ray.core.draft_head import DraftHead, candidate_logits
from mars_ray.core.penalties import adjust
from mars_ray.decode.adapter import FusedAdapter
from mars_ray.decode.runner import Runner
from mars_ray.decode.scoring import NOT_A_NUMBER, Block, best, sample, score, upload
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import Plan, Proposals
from mars_ray.errors import EngineError


@dataclass(frozen=True, slots=True)
class Masks:
    """A sequence's masks behind an outcome."""

    sequence: Sequence
    plan: Plan
    outcome: int  # drafts before them
    token: int  # and behind those the token of the outcome's row
    own: slice  # among the rows that are read; empty if there are none

    @property
    def count(self) -> int:
        """How many there are."""
        return self.own.stop - self.own.start

    @property
    def answer(self) -> list[int]:
        """What of the answer stands before them, and is more than a guess."""
        sequence = self.sequence
        answer = sequence.tokens[len(sequence.request.prompt) :]
        return answer + self.plan.drafts[: self.outcome]


def choose_drafts(
    runner: Runner,
    hidden_MH: Tensor,
    logits_MV: Tensor,
    position_M: Tensor,
    masks: Several[Masks],
) -> list[Proposals]:
    """For each sequence; `position_M` are those of the tokens to come."""
    adapter = runner.adapter
    if adapter and adapter.head:
        drafts = _Drafts(runner, adapter, adapter.head, hidden_MH, logits_MV, position_M, masks)
        return drafts.by_head()
    return _by_themselves(logits_MV, position_M, masks)


def _by_themselves(logits_MV: Tensor, position_M: Tensor, masks: Several[Masks]) -> list[Proposals]:
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
    score(logits_MV, blocks, position_M)
    best_M, _ = best(logits_MV, np.zeros(len(logits_MV), np.int64))
    tokens = best_M.tolist()
    if NOT_A_NUMBER in tokens:
        raise EngineError("the model gives numbers that are none")
    return [
        Proposals(tokens[each.own], measured[measure][each.own], log_p_NV)
        for each, measure, log_p_NV in zip(masks, measures, log_p, strict=True)
    ]


def _log_p(logits_MV: Tensor, masks: Masks) -> Tensor | None:
    if masks.sequence.request.logprobs is None:
        return None
    return logits_MV[masks.own].log_softmax(dim=-1)


class _Drafts:
    """One step's, by the sequential head."""

    def __init__(
        self,
        runner: Runner,
        adapter: FusedAdapter,
        head: DraftHead,
        hidden_MH: Tensor,
        logits_MV: Tensor,
        position_M: Tensor,
        masks: Several[Masks],
    ) -> None:
        assert runner.vocabulary_VH is not None
        self._runner, self._head, self._vocabulary_VH = runner, head, runner.vocabulary_VH
        self._hidden_MH, self._logits_MV, self._position_M = hidden_MH, logits_MV, position_M
        self._masks = masks
        likeliest_MC, self._candidate_MC = logits_MV.topk(adapter.candidates)
        # What is never emitted is no candidate either, where the vocabulary is small.
        self._banned_MC = torch.zeros_like(likeliest_MC).masked_fill_(
            likeliest_MC == -torch.inf, -torch.inf
        )

    def by_head(self) -> list[Proposals]:
        """Depth by depth."""
        rows = len(self._hidden_MH)
        device = self._hidden_MH.device
        token_M = torch.empty(rows, dtype=torch.long, device=device)
        number_M = torch.empty(rows, dtype=torch.float32, device=device)
        before = upload(torch.tensor([each.token for each in self._masks]), device)
        for depth in range(max(each.count for each in self._masks)):
            members = [index for index, each in enumerate(self._masks) if each.count > depth]
            row_X = upload(
                torch.tensor([self._masks[index].own.start + depth for index in members]), device
            )
            member_X = upload(torch.tensor(members), device)
            token_X, number_X = self._choose(depth, members, row_X, before[member_X], token_M)
            token_M[row_X], number_M[row_X], before[member_X] = token_X, number_X, token_X
        tokens, numbers = token_M.tolist(), number_M.nan_to_num(0.0).tolist()
        return [
            Proposals(tokens[each.own], numbers[each.own], _log_p(self._logits_MV, each))
            for each in self._masks
        ]

    def _choose(
        self, depth: int, members: list[int], row_X: Tensor, before_X: Tensor, token_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Proposals of some sequences at one depth, and how sure each is."""
        corrected_XH = self._head.correct(
            self._hidden_MH[row_X], self._runner.embed(before_X), torch.full_like(row_X, depth + 1)
        )
        candidate_XC = self._candidate_MC[row_X]
        logits_XC = candidate_logits(corrected_XH, self._vocabulary_VH, candidate_XC)
        logits_XC += self._banned_MC[row_X]
        numbers: dict[Measure | None, Tensor] = {}
        measures: list[Measure | None] = [self._masks[index].plan.measure for index in members]
        for measure in set(measures):
            if measure:
                numbers[measure] = confidence(logits_XC, measure)
        for place, index in enumerate(members):
            each, row = self._masks[index], self._masks[index].own.start + depth
            if each.sequence.request.logprobs is not None:
                self._logits_MV[row].scatter_(0, candidate_XC[place], logits_XC[place])
            if each.sequence.request.sampling.changes_logits:
                own = token_M[each.own.start : row].tolist()
                logits_XC[place] = self._adjusted(each, own, candidate_XC[place], logits_XC[place])
        blocks = [
            Block(self._masks[index].sequence.request, slice(place, place + 1))
            for place, index in enumerate(members)
        ]
        sample(logits_XC, blocks, self._position_M[row_X.cpu()], candidate_XC)
        chosen_X1 = logits_XC.argmax(dim=-1, keepdim=True)
        numbers[None] = logits_XC.softmax(dim=-1).gather(-1, chosen_X1).squeeze(-1)
        number_X = torch.stack([numbers[measure][at] for at, measure in enumerate(measures)])
        return candidate_XC.gather(-1, chosen_X1).squeeze(-1), number_X

    def _adjusted(
        self, masks: Masks, own: list[int], candidate_C: Tensor, logits_C: Tensor
    ) -> Tensor:
        """By penalties and the like, as a row that has the chosen drafts before it."""
        row_1V = self._logits_MV.new_full((1, self._logits_MV.shape[1]), -torch.inf)
        row_1V[0, candidate_C] = logits_C
        request, answer = masks.sequence.request, [*masks.answer, masks.token, *own]
        adjust(row_1V, request.sampling, request.prompt, [answer], [len(answer)], request.stop_ids)
        return row_1V[0, candidate_C]
