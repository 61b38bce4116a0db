"""From the rows of a forward to tokens and numbers on the host.

It reads the rows of real tokens first, which determine where each sequence's step ends. Then it
reads only the masks behind that end: the others are useless, and the vocabulary is large.

Shape suffixes: N rows of a forward or of a sequence, P rows of real tokens that are read, M rows of
masks that are read, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import chain
from typing import cast

import numpy as np
import torch
from torch import Tensor

from mars_ray.core.acceptance import confidence
from mars_ray.decode.attention.backend import Backend
from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.draft_selection import choose_drafts
from mars_ray.decode.logits import NOT_A_NUMBER, Block, adjust_all, upload
from mars_ray.decode.scheduler import Work
from mars_ray.decode.strategies.base import Masks, Plan, Proposals, Rows, Wanted
from mars_ray.errors import EngineError

# Up to this many rows are computed at once: their time is that of reading the vocabulary's weights.
_AT_ONCE = 16


class Sampler:
    """Reads one forward. Sequences without a plan are skipped, since nobody needs their rows."""

    def __init__(
        self,
        backend: Backend,
        work: Several[Work],
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
    def rows(self, meanwhile: Callable[[], None]) -> list[Rows]:
        """For every plan, the rows of its last committed token and drafts, and those under review.

        `meanwhile` is called once all work is launched on the device.
        """
        index = list(chain.from_iterable(planned.rows for planned in self._planned))
        if not index:
            meanwhile()
            return []
        logits_PV = self._logits(index)
        owns, end = [], 0
        for planned in self._planned:
            owns.append(slice(end, end + len(planned.rows)))
            end = owns[-1].stop
        # A row at position t predicts the token of position t + 1.
        position_P = self._position_N[index] + 1
        return self._to_host(logits_PV, owns, position_P, meanwhile)

    @torch.inference_mode()
    def proposals(self, outcomes: Several[int], tokens: Several[int]) -> list[Proposals]:
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
            logits_MV = _picked(self._mask_logits_MV, [row - self._first_mask for row in wanted])
        masks = [
            Masks(planned.item.sequence, planned.plan, outcome, token, own)
            for planned, outcome, token, own in zip(
                self._planned, outcomes, tokens, owns, strict=True
            )
        ]
        position_M = self._position_N[wanted] + 1
        return choose_drafts(self._backend, wanted, logits_MV, position_M, masks)

    @torch.inference_mode()
    def log_p(self, item: int, rows: range) -> Tensor:
        """Log-probabilities in some rows of the work's item of this number, (P, V)."""
        index = [self._first[item] + row for row in rows]
        return self._banned(self._backend.logits(index)).log_softmax(dim=-1)

    def _logits(self, index: list[int]) -> Tensor:
        """Logits of these rows, and if there are few rows, of all masks too."""
        end = len(self._position_N)
        masks = end - self._first_mask
        is_at_once = 0 < masks <= _AT_ONCE - len(index)
        wanted = [*index, *range(self._first_mask, end)] if is_at_once else index
        logits_PV = self._banned(self._backend.logits(wanted))
        if is_at_once:
            logits_PV, self._mask_logits_MV = logits_PV.split([len(index), masks])
        return logits_PV

    def _banned(self, logits_PV: Tensor) -> Tensor:
        if self._mask_token_id is not None:
            # The mask token is never emitted, in any mode.
            logits_PV.select(1, self._mask_token_id).fill_(-torch.inf)
        return logits_PV

    def _to_host(
        self,
        logits_PV: Tensor,
        owns: Several[slice],
        position_P: np.ndarray,
        meanwhile: Callable[[], None],
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
        best_P, measured["ratio"] = self._backend.choose(
            logits_PV, blocks, position_P, *_drafts(plans, len(logits_PV))
        )
        meanwhile()
        tokens, *values = _lists([best_P, *(measured[name] for name in wanted)])
        tokens = [int(token) for token in tokens]
        if NOT_A_NUMBER in tokens:
            raise EngineError("the model gives numbers that are none")
        numbers = dict(zip(wanted, values, strict=True))
        return [
            _rows(plan, tokens[own], {name: numbers[name][own] for name in plan.wanted}, log_p_NV)
            for plan, own, log_p_NV in zip(plans, owns, log_p, strict=True)
        ]


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


def _picked(logits_MV: Tensor, rows: list[int]) -> Tensor:
    """Some of the rows, in increasing order; as a view if they follow each other."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return logits_MV[rows[0] : rows[-1] + 1]
    return logits_MV.index_select(0, upload(torch.tensor(rows), logits_MV.device))


def _lists(columns: Several[Tensor]) -> list[list[float]]:
    """Columns on the host, in one copy from a GPU. Token ids are exact in float32 up to 2^24."""
    if columns[0].device.type == "cpu":
        return [column.tolist() for column in columns]
    return torch.stack([column.float() for column in columns]).tolist()


def _rows(
    plan: Plan, tokens: list[int], numbers: dict[Wanted, list[float]], log_p_NV: Tensor | None
) -> Rows:
    """A plan's rows; the tokens of the rows under review, which come first, are kept apart."""
    first = plan.review
    return Rows(
        tokens[first:],
        {name: values[first:] for name, values in numbers.items()},
        None if log_p_NV is None else log_p_NV[first:],
        tokens[:first],
    )


def _drafts(plans: Several[Plan], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The drafts, laid out from the row of each plan's last committed token on, and the rows of
    their parents; 0 and the row itself where there is no draft."""
    draft_P, parent_P = np.zeros(rows, np.int64), np.arange(rows)
    row = 0
    for plan in plans:
        row += plan.review
        drafts = len(plan.drafts)
        draft_P[row : row + drafts] = plan.drafts
        parent_P[row : row + drafts] = row + np.array(plan.parents, np.int64)
        row += 1 + drafts
    return draft_P, parent_P
