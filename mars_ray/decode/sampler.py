"""From the rows of a forward to tokens and numbers on the host.

It reads the rows of real tokens first, which determine where each sequence's step ends. Then it
reads only the masks behind that end: the others are useless, and the vocabulary is large.

Without a sequential head each mask proposes by itself. With a head (`core.draft_head`) the token
before each mask is known: that of the outcome's row, or the proposal just made. So the head works
depth by depth, for all sequences together, and only on each row's likeliest tokens.

The first mask may propose several tokens, each the first of a branch, which continues as a chain.
Without a head the chain is the same in all; with a head it depends on the branch's own tokens.

Shape suffixes: N rows of a forward or of a sequence, P rows of real tokens that are read, M rows of
masks that are read, L branches of all sequences, X those of one depth, D depths, C candidates, H
hidden size, V vocabulary, S sequences with several branches, A alternatives.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import cast

import numpy as np
import torch
from torch import Tensor

from mars_ray.core.acceptance import Measure, confidence
from mars_ray.core.draft_head import DraftHead, likeliest
from mars_ray.core.sampling import adjust
from mars_ray.core.tree import fan
from mars_ray.decode.adapter import FusedAdapter
from mars_ray.decode.attention.backend import Backend
from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.cpu.backend import CompiledBackend
from mars_ray.decode.logits import NOT_A_NUMBER, Block, adjust_all, best, sample, upload
from mars_ray.decode.scheduler import Work
from mars_ray.decode.strategies import Masks, Plan, Proposals, Rows, Wanted
from mars_ray.errors import EngineError

# Up to this many rows are computed at once: their time is that of reading the vocabulary's weights.
_AT_ONCE = 16


class Sampler:
    """Reads one forward. Sequences without a plan are skipped, since nobody needs their rows."""

    def __init__(
        self,
        backend: Backend,
        work: Sequence[Work],
        tables: Tables,
        position_N: np.ndarray,
        mask_token_id: int | None,
    ) -> None:
        self._backend = backend
        self._position_N = position_N
        self._mask_token_id = mask_token_id
        real = zip(work, tables.first_S.tolist(), tables.first_mask_S.tolist(), strict=True)
        self._planned = [
            _Planned(item, cast(Plan, item.plan), first, first_mask)
            for item, first, first_mask in real
            if item.plan
        ]
        self._first = tables.first_S.tolist()
        # Logits of all masks, in their order, if they were computed along with the others.
        self._first_mask = len(position_N) - tables.masks
        self._mask_logits_MV: Tensor | None = None

    @torch.inference_mode()
    def rows(self, overlap: Callable[[], None]) -> list[Rows]:
        """For every plan, the rows of its last committed token and drafts, and those under review.

        `overlap` is called once all work is launched on the device.
        """
        index = list(chain.from_iterable(planned.rows for planned in self._planned))
        if not index:
            overlap()
            return []
        # If there are few rows, those of all masks too.
        masks = len(self._position_N) - self._first_mask
        is_at_once = 0 < masks <= _AT_ONCE - len(index)
        wanted = range(self._first_mask, len(self._position_N)) if is_at_once else ()
        logits_PV = self._banned(self._backend.logits([*index, *wanted]))
        if is_at_once:
            logits_PV, self._mask_logits_MV = logits_PV.split([len(index), masks])
        owns, end = [], 0
        for planned in self._planned:
            owns.append(slice(end, end + len(planned.rows)))
            end = owns[-1].stop
        # A row at position t predicts the token of position t + 1.
        position_P = self._position_N[index] + 1
        return self._to_host(logits_PV, owns, position_P, overlap)

    @torch.inference_mode()
    def proposals(self, outcomes: Sequence[int], tokens: Sequence[int]) -> list[Proposals]:
        """For every plan, the proposals of the masks behind its outcome; `tokens` are those that
        the outcomes' rows predict, just before the masks'."""
        wanted, owns, end = [], [], 0
        for planned, outcome in zip(self._planned, outcomes, strict=True):
            own = planned.plan.masks_behind(outcome)
            rows = range(planned.first_mask + own.start, planned.first_mask + own.stop)
            owns.append(slice(end, end + len(rows)))
            wanted += rows
            end = owns[-1].stop
        if not wanted:
            return [Proposals() for _ in owns]
        if self._mask_logits_MV is None:
            logits_MV = self._banned(self._backend.logits(wanted))
        else:
            first, last = (row - self._first_mask for row in (wanted[0], wanted[-1]))
            if last - first == len(wanted) - 1:
                logits_MV = self._mask_logits_MV[first : last + 1]  # a view
            else:
                row_M = upload(torch.tensor(wanted) - self._first_mask, self._backend.device)
                logits_MV = self._mask_logits_MV.index_select(0, row_M)
        masks = [
            Masks(planned.item.sequence, planned.plan, outcome, token, own)
            for planned, outcome, token, own in zip(
                self._planned, outcomes, tokens, owns, strict=True
            )
        ]
        position_M, backend = self._position_N[wanted] + 1, self._backend
        adapter = backend.adapter
        if not adapter or not adapter.head:
            return _by_themselves(backend, logits_MV, position_M, masks)
        if isinstance(backend, CompiledBackend):
            found = backend.drafts(masks, wanted, logits_MV, position_M)
            if found is not None:
                said = zip(*found, strict=True)
                branches = [each.branches_of(adapter.candidates) for each in masks]
                return [
                    _proposals(islice(said, count), each.count)
                    for each, count in zip(masks, branches, strict=True)
                ]
        hidden_MH = backend.hidden(wanted)
        drafts = _Drafts(backend, adapter, adapter.head, hidden_MH, logits_MV, position_M, masks)
        return drafts.by_head()

    @torch.inference_mode()
    def log_p(self, item: int, rows: range) -> Tensor:
        """Log-probabilities in some rows of the work's item of this number, (P, V)."""
        index = [self._first[item] + row for row in rows]
        return self._banned(self._backend.logits(index)).log_softmax(dim=-1)

    def _banned(self, logits_PV: Tensor) -> Tensor:
        if self._mask_token_id is not None:
            # The mask token is never emitted, in any mode.
            logits_PV.select(1, self._mask_token_id).fill_(-torch.inf)
        return logits_PV

    def _to_host(
        self,
        logits_PV: Tensor,
        owns: Sequence[slice],
        position_P: np.ndarray,
        overlap: Callable[[], None],
    ) -> list[Rows]:
        """Tokens and numbers of all rows in one copy."""
        plans = [planned.plan for planned in self._planned]
        wanted: list[Wanted] = sorted({name for plan in plans for name in plan.wanted})
        measured: dict[Wanted, Tensor] = {
            name: confidence(logits_PV, name) for name in wanted if name != "ratio"
        }
        blocks, log_p = [], []
        for planned, own in zip(self._planned, owns, strict=True):
            is_asked = planned.item.sequence.request.logprobs is not None
            log_p.append(logits_PV[own].log_softmax(dim=-1) if is_asked else None)
            blocks.append(planned.block(own))
        adjust_all(logits_PV, blocks, position_P)
        # The drafts, from the row of each plan's last committed token on, and the rows of their
        # parents; 0 and the row itself where there is no draft.
        draft_P, parent_P = np.zeros(len(logits_PV), np.int64), np.arange(len(logits_PV))
        for plan, own in zip(plans, owns, strict=True):
            row, drafts = own.start + plan.review, len(plan.drafts)
            draft_P[row : row + drafts] = plan.drafts
            parent_P[row : row + drafts] = row + np.array(plan.parents, np.int64)
        best_P, measured["ratio"] = self._backend.choose(
            logits_PV, blocks, position_P, draft_P, parent_P
        )
        overlap()
        columns = [best_P, *(measured[name] for name in wanted)]
        if best_P.device.type == "cpu":
            tokens, *values = [column.tolist() for column in columns]
        else:  # in one copy; token ids are exact in float32 up to 2^24
            tokens, *values = torch.stack([column.float() for column in columns]).tolist()
        tokens = [int(token) for token in tokens]
        if NOT_A_NUMBER in tokens:
            raise EngineError("the logits contain NaN or Inf")
        numbers = dict(zip(wanted, values, strict=True))
        rows = []
        for plan, own, log_p_NV in zip(plans, owns, log_p, strict=True):
            first = own.start + plan.review  # the rows under review come first
            rows.append(
                Rows(
                    tokens[first : own.stop],
                    {name: numbers[name][first : own.stop] for name in plan.wanted},
                    None if log_p_NV is None else log_p_NV[plan.review :],
                    tokens[own.start : first],
                )
            )
        return rows


@dataclass(frozen=True, slots=True)
class _Planned:
    """A sequence whose rows are read."""

    item: Work
    plan: Plan
    first: int  # index of its first row among the forward's
    first_mask: int

    @property
    def rows(self) -> range:
        """Rows from the first one under review to that of the last draft."""
        first = self.first + self.item.count - 1 - self.plan.review
        return range(first, self.first + self.item.count + len(self.plan.drafts))

    def block(self, own: slice) -> Block:
        sequence, plan = self.item.sequence, self.plan
        request, answers = sequence.request, []
        if request.sampling.changes_logits:
            answer = sequence.tokens[len(request.prompt) :]
            answers = [answer[: index - plan.review] for index in range(plan.review)]
            answers += [answer + plan.tokens(node) for node in range(len(plan.drafts) + 1)]
        grammar = sequence.grammar
        allowed_RV = grammar.allowed(plan.review, plan.drafts) if grammar else None
        return Block(request, own, answers, allowed_RV)


def _by_themselves(
    backend: Backend, logits_MV: Tensor, position_M: np.ndarray, masks: Sequence[Masks]
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
    several = [each for each in masks if each.sequence.branches > 1 and each.count]
    first = torch.tensor([each.own.start for each in several], dtype=torch.long)
    first_S = upload(first, logits_MV.device)
    p_SV = logits_MV[first_S].softmax(dim=-1)
    nothing_M = np.zeros(0, np.int64)
    adjust_all(logits_MV, blocks, position_M)
    if several:  # whose scores are wanted, too
        sample(logits_MV, blocks, position_M)
        best_M, _ = best(logits_MV, nothing_M, nothing_M)
    else:
        best_M, _ = backend.choose(logits_MV, blocks, position_M, nothing_M, nothing_M)
    tokens = best_M.tolist()
    if NOT_A_NUMBER in tokens:
        raise EngineError("the logits contain NaN or Inf")
    others = iter(_others(logits_MV[first_S], p_SV, several))
    made = []
    for each, measure, log_p_NV in zip(masks, measures, log_p, strict=True):
        own, sure = tokens[each.own], measured[measure][each.own]
        branches = [(own, sure)]
        if each.sequence.branches > 1 and own:
            branches += [([t, *own[1:]], [p, *sure[1:]]) for t, p in next(others)]
        made.append(_proposals(branches, each.count, log_p_NV))
    return made


def _others(
    scores_SV: Tensor, p_SV: Tensor, several: Sequence[Masks]
) -> list[list[tuple[int, float]]]:
    """Each row's next best tokens after its best one, with their probabilities in that row."""
    if not several:
        return []
    most = min(max(each.sequence.branches for each in several), scores_SV.shape[-1])
    top_SA = scores_SV.topk(most, dim=-1)
    p_SA = p_SV.gather(-1, top_SA.indices).masked_fill(top_SA.values == -torch.inf, 0.0)
    pairs = zip(several, top_SA.indices.tolist(), p_SA.tolist(), strict=True)
    return [
        list(zip(tokens, numbers, strict=True))[1 : each.sequence.branches]
        for each, tokens, numbers in pairs
    ]


def _proposals(
    branches: Iterable[tuple[list[int], list[float]]], depth: int, log_p_NV: Tensor | None = None
) -> Proposals:
    """Branches with their confidences, cut to a depth, without those whose first token has
    probability 0."""
    kept = [
        (tokens[:depth], numbers[:depth])
        for index, (tokens, numbers) in enumerate(branches)
        if index == 0 or numbers[0] > 0
    ]
    return Proposals(
        list(chain.from_iterable(tokens for tokens, _ in kept)),
        list(chain.from_iterable(numbers for _, numbers in kept)),
        fan(len(kept), depth),
        log_p_NV,
    )


def _log_p(logits_MV: Tensor, masks: Masks) -> Tensor | None:
    return logits_MV[masks.own].log_softmax(dim=-1) if masks.is_told else None


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
        masks: Sequence[Masks],
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
            log_p_NV = _log_p(self._logits_MV, each)
            made.append(_proposals(islice(said, own), each.count, log_p_NV))
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
            if each.is_told and index not in noted:
                row_V = self._logits_MV[each.own.start + depth]
                row_V.scatter_(0, candidate_XC[place], logits_XC[place])
                noted.add(index)  # only for the first branch
            if each.sequence.request.sampling.changes_logits:
                row_1V = self._logits_MV.new_full((1, self._logits_MV.shape[1]), -torch.inf)
                row_1V[0, candidate_XC[place]] = logits_XC[place]
                # With the chosen drafts before it.
                request, answer = each.sequence.request, [*each.answer, *before_XD[place].tolist()]
                changes, stops = request.sampling, request.stop_ids
                adjust(row_1V, changes, request.prompt, [answer], [len(answer)], stops)
                logits_XC[place] = row_1V[0, candidate_XC[place]]
