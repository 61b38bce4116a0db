"""One forward over the rows of many sequences, laid end to end.

Only attention knows where a sequence ends, so a prompt's chunk and single decoding rows share all
matrix products, and none is padded.

Shape suffixes: N rows of a forward, P rows that are read, B sequences of a group, Q rows of the
longest, C places of the longest table, V vocabulary.
"""

from collections.abc import Sequence as Several
from itertools import chain
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.core.accept import confidence
from mars_ray.core.penalties import adjust
from mars_ray.core.sampling import scores
from mars_ray.decode.kv_cache import Group, PagedCache, PagedStep
from mars_ray.decode.scheduler import Work
from mars_ray.decode.strategies.base import Plan, Rows, Wanted
from mars_ray.model.forward import hidden_states, output_head

# Sequences with at most so many rows attend together; a longer one would pad all others.
_NARROW = 32


@torch.inference_mode()
def forward(
    model: PreTrainedModel, cache: PagedCache, work: Several[Work], mask_token_id: int
) -> list[Rows | None]:
    """Forward [pending | drafts | masks] of every sequence; the rows of those that have a plan."""
    device = model.device
    widths = [item.rows for item in work]
    starts = [item.sequence.cached for item in work]
    place_N, position_N = _places(work, widths, starts, cache.page_size)
    step = PagedStep(cache, place_N.to(device), _groups(work, widths, starts, cache, model))
    ids_N = torch.tensor(list(chain.from_iterable(_tokens(w, mask_token_id) for w in work)))
    hidden_NH = hidden_states(
        model, ids_N[None].to(device), position_N[None].to(device), None, paged=step
    )[0]
    if not any(item.plan for item in work):
        return [None] * len(work)
    rows = iter(_read(model, hidden_NH, work, widths, position_N, mask_token_id))
    return [next(rows) if item.plan else None for item in work]


def _tokens(item: Work, mask_token_id: int) -> list[int]:
    sequence, plan = item.sequence, item.plan
    real = sequence.tokens[sequence.cached : sequence.cached + item.count]
    if plan is None:
        return real
    return [*real, *plan.drafts, *([mask_token_id] * (plan.rows - len(plan.drafts)))]


def _places(
    work: Several[Work], widths: list[int], starts: list[int], page_size: int
) -> tuple[Tensor, Tensor]:
    """Where each row's keys and values go in the pool, and its position; int64 (N,) each."""
    places, positions = [], []
    for item, width, start in zip(work, widths, starts, strict=True):
        index = np.arange(start, start + width)
        pages = np.asarray(item.sequence.pages)
        places.append(pages[index // page_size] * page_size + index % page_size)
        positions.append(_positions(item, index))
    return torch.from_numpy(np.concatenate(places)), torch.from_numpy(np.concatenate(positions))


def _positions(item: Work, index: np.ndarray) -> np.ndarray:
    """A row's position is its place in the sequence, unless a group of masks stands elsewhere."""
    if item.plan is None or item.plan.is_causal:
        return index
    committed = index[0] + item.count
    real = index[: item.count + len(item.plan.drafts)]
    masks = [committed + g.after + np.arange(g.masks) for g in item.plan.groups]
    return np.concatenate([real, *masks])


def _groups(
    work: Several[Work],
    widths: list[int],
    starts: list[int],
    cache: PagedCache,
    model: PreTrainedModel,
) -> list[Group]:
    narrow = [i for i, width in enumerate(widths) if width <= _NARROW]
    members = [[i] for i, width in enumerate(widths) if width > _NARROW]
    if narrow:
        members.append(narrow)
    first_rows = np.concatenate(([0], np.cumsum(widths)))
    return [
        _group(
            [work[i] for i in group],
            np.array([widths[i] for i in group]),
            np.array([starts[i] for i in group]),
            first_rows[group],
            cache.page_size,
            model,
            whole=len(members) == 1,
        )
        for group in members
    ]


def _group(
    work: Several[Work],
    width_B: np.ndarray,
    start_B: np.ndarray,
    first_row_B: np.ndarray,
    page_size: int,
    model: PreTrainedModel,
    *,
    whole: bool,
) -> Group:
    longest = width_B.max()
    offset_Q = np.arange(longest)
    page_count = -(-int((start_B + width_B).max()) // page_size)
    page_BM = np.zeros((len(work), page_count), dtype=np.int64)
    for row, item in zip(page_BM, work, strict=True):
        pages = item.sequence.pages[:page_count]
        row[: len(pages)] = pages
    index_BQ = start_B[:, None] + offset_Q
    hidden_B1QC = (np.arange(page_count * page_size) > index_BQ[:, :, None])[:, None]
    for hidden_QC, item, start in zip(hidden_B1QC[:, 0], work, start_B, strict=True):
        if item.plan and not item.plan.is_causal:
            _separate(hidden_QC, item, int(start))
    bias = torch.zeros(hidden_B1QC.shape, dtype=model.dtype)
    bias.masked_fill_(torch.from_numpy(hidden_B1QC), -torch.inf)
    padded = bool((width_B != longest).any())
    real_BQ = offset_Q < width_B[:, None]
    # Padding repeats a sequence's first row.
    row_BQ = first_row_B[:, None] + np.where(real_BQ, offset_Q, 0)
    device = model.device
    return Group(
        None if whole and not padded else torch.from_numpy(row_BQ).to(device),
        torch.from_numpy(real_BQ.ravel().nonzero()[0]).to(device) if padded else None,
        torch.from_numpy(page_BM).to(device),
        bias.to(device),
    )


def _separate(hidden_QC: np.ndarray, item: Work, start: int) -> None:
    """Hide from each group of masks the drafts behind it and the groups before it."""
    assert item.plan
    row = item.count + len(item.plan.drafts)
    for group in item.plan.groups:
        seen = start + item.count + group.after
        hidden_QC[row : row + group.masks, seen : start + row] = True
        row += group.masks


def _read(
    model: PreTrainedModel,
    hidden_NH: Tensor,
    work: Several[Work],
    widths: list[int],
    position_N: Tensor,
    mask_token_id: int,
) -> list[Rows]:
    """The rows from each sequence's last real token on, and those under review before it."""
    index, start = [], 0
    for item, width in zip(work, widths, strict=True):
        if item.plan:
            index.append(np.arange(start + item.count - 1 - item.plan.review, start + width))
        start += width
    index_P = torch.from_numpy(np.concatenate(index))
    logits_PV = output_head(model)(hidden_NH[index_P.to(hidden_NH.device)]).float()
    # Never emitted, in any mode.
    logits_PV[:, mask_token_id] = -torch.inf
    planned = [item for item in work if item.plan]
    counts = [len(rows) for rows in index]
    # A row at position t predicts the token of position t + 1.
    return _to_host(logits_PV, planned, counts, position_N[index_P] + 1)


def _to_host(
    logits_PV: Tensor, work: Several[Work], counts: list[int], position_P: Tensor
) -> list[Rows]:
    """Tokens and numbers of all rows in one copy."""
    plans = [cast(Plan, item.plan) for item in work]
    wanted: list[Wanted] = sorted({name for plan in plans for name in plan.wanted})
    measured: dict[Wanted, Tensor] = {
        name: confidence(logits_PV, name) for name in wanted if name != "ratio"
    }
    owns = [slice(end - n, end) for n, end in zip(counts, np.cumsum(counts), strict=True)]
    log_p = [
        logits_PV[own].log_softmax(dim=-1) if item.sequence.request.logprobs is not None else None
        for item, own in zip(work, owns, strict=True)
    ]
    for item, own in zip(work, owns, strict=True):
        _score(logits_PV[own], item, position_P[own])
    best_score_P, best_P = logits_PV.max(dim=-1)
    if "ratio" in wanted:
        draft_P = _drafts(plans, logits_PV.device)
        draft_score_P = logits_PV.gather(-1, draft_P[:, None]).squeeze(-1)
        measured["ratio"] = (draft_score_P - best_score_P).exp()
    columns = [best_P.double()] + [measured[name].double() for name in wanted]
    host = torch.stack(columns).tolist()
    best = [int(token) for token in host[0]]
    numbers = dict(zip(wanted, host[1:], strict=True))
    return [
        _rows(plan, best[own], {name: numbers[name][own] for name in plan.wanted}, log_p_NV)
        for plan, own, log_p_NV in zip(plans, owns, log_p, strict=True)
    ]


def _rows(
    plan: Plan, best: list[int], numbers: dict[Wanted, list[float]], log_p_NV: Tensor | None
) -> Rows:
    """Apart from the rows under review, which come first."""
    first = plan.review
    return Rows(
        best[first:],
        {name: values[first:] for name, values in numbers.items()},
        None if log_p_NV is None else log_p_NV[first:],
        best[:first],
    )


def _score(logits_NV: Tensor, item: Work, position_N: Tensor) -> None:
    """Turn a sequence's logits into scores, in place; greedy ones are that already."""
    request, plan = item.sequence.request, item.plan
    assert plan
    if request.sampling.changes_logits:
        answer = item.sequence.tokens[len(request.prompt) :]
        answers = [answer[: index - plan.review] for index in range(plan.review)]
        answers += [answer + drafts for drafts in plan.drafts_before()]
        adjust(logits_NV, request.sampling, request.prompt, answers, request.stop_ids)
    if request.sampling.temperature > 0:
        logits_NV.copy_(scores(logits_NV, request.sampling, position_N))


def _drafts(plans: Several[Plan], device: torch.device) -> Tensor:
    """The draft after each row, 0 where there is none."""
    drafts = []
    for plan in plans:
        drafts += [0] * plan.review + plan.drafts + [0] * (1 + plan.rows - len(plan.drafts))
    return torch.tensor(drafts, device=device)
