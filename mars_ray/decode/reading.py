"""From the rows of a forward to tokens and numbers on the host.

Shape suffixes: N rows of a forward or of a sequence, P rows that are read, H hidden size, V
vocabulary.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Several
from itertools import chain
from typing import cast

import numpy as np
import torch
from torch import Tensor

from mars_ray.core.accept import confidence
from mars_ray.core.penalties import adjust
from mars_ray.core.sampling import scores
from mars_ray.decode.runner import Runner
from mars_ray.decode.scheduler import Work
from mars_ray.decode.strategies.base import Plan, Rows, Wanted
from mars_ray.errors import EngineError

# Stands for the best token of a row without numbers.
_NOT_A_NUMBER = -1


def read(
    runner: Runner,
    hidden_NH: Tensor,
    work: Several[Work],
    position_N: Tensor,
    mask_token_id: int | None,
    meanwhile: Callable[[], None],
) -> list[Rows]:
    """For every plan the rows from its last real token on, and those under review before it.

    `meanwhile` as in `batch.forward`.
    """
    index, owns, start, end = [], [], 0, 0
    for item in work:
        if item.plan:
            first = start + item.count - 1 - item.plan.review
            index.append(range(first, start + item.rows))
            owns.append(slice(end, end + len(index[-1])))
            end = owns[-1].stop
        start += item.rows
    if end < start:
        index_P = torch.tensor(list(chain.from_iterable(index)))
        hidden_NH = hidden_NH.index_select(0, _upload(index_P, runner.device))
        position_N = position_N[index_P]
    logits_PV = runner.logits(hidden_NH)
    if mask_token_id is not None:
        # Never emitted, in any mode.
        logits_PV.select(1, mask_token_id).fill_(-torch.inf)
    planned = [item for item in work if item.plan]
    # A row at position t predicts the token of position t + 1.
    return _to_host(runner, logits_PV, planned, owns, position_N + 1, meanwhile)


def _to_host(
    runner: Runner,
    logits_PV: Tensor,
    work: Several[Work],
    owns: Several[slice],
    position_P: Tensor,
    meanwhile: Callable[[], None],
) -> list[Rows]:
    """Tokens and numbers of all rows in one copy."""
    plans = [cast(Plan, item.plan) for item in work]
    wanted: list[Wanted] = sorted({name for plan in plans for name in plan.wanted})
    measured: dict[Wanted, Tensor] = {
        name: confidence(logits_PV, name) for name in wanted if name != "ratio"
    }
    log_p = [
        logits_PV[own].log_softmax(dim=-1) if item.sequence.request.logprobs is not None else None
        for item, own in zip(work, owns, strict=True)
    ]
    _adjust(logits_PV, work, owns, position_P)
    _sample(logits_PV, work, owns, position_P)
    best_P, measured["ratio"] = _best(logits_PV, _drafts(plans, len(logits_PV)))
    meanwhile()
    best, *values = _lists(runner, [best_P, *(measured[name] for name in wanted)])
    best = [int(token) for token in best]
    if _NOT_A_NUMBER in best:
        raise EngineError("the model gives numbers that are none")
    numbers = dict(zip(wanted, values, strict=True))
    return [
        _rows(plan, best[own], {name: numbers[name][own] for name in plan.wanted}, log_p_NV)
        for plan, own, log_p_NV in zip(plans, owns, log_p, strict=True)
    ]


def _best(logits_PV: Tensor, draft_P: np.ndarray) -> tuple[Tensor, Tensor]:
    """Each row's best token, and how likely its draft is beside that."""
    if logits_PV.device.type == "cpu":
        # Several times faster than torch, which looks for a maximum one number at a time.
        score_PV, row_P = logits_PV.numpy(), np.arange(len(draft_P))
        best_P = score_PV.argmax(axis=-1)
        most_P = score_PV[row_P, best_P]
        # Behind the end of what a grammar allows every token has -inf.
        with np.errstate(invalid="ignore"):
            ratio_P = np.exp(score_PV[row_P, draft_P] - most_P)
        best_P[np.isnan(most_P)] = _NOT_A_NUMBER
        return torch.from_numpy(best_P), torch.from_numpy(ratio_P)
    best_P = logits_PV.argmax(dim=-1)
    draft = _upload(torch.from_numpy(draft_P), logits_PV.device)
    pair_P2 = torch.stack([draft, best_P], dim=-1)
    score_P2 = logits_PV.gather(-1, pair_P2)
    best_P = best_P.masked_fill(score_P2[:, 1].isnan(), _NOT_A_NUMBER)
    return best_P, (score_P2[:, 0] - score_P2[:, 1]).exp()


def _lists(runner: Runner, columns: Several[Tensor]) -> list[list[float]]:
    """On the host, from a GPU in one copy. Token ids are exact in float32 up to 2^24."""
    if runner.device.type == "cpu":
        return [column.tolist() for column in columns]
    started = time.perf_counter()
    lists = torch.stack([column.float() for column in columns]).tolist()
    runner.seconds += time.perf_counter() - started
    return lists


def _upload(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it: the forward is still at work there."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


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


def _adjust(
    logits_PV: Tensor, work: Several[Work], owns: Several[slice], position_P: Tensor
) -> None:
    """Penalties, biases and grammars of the requests that have some, in place."""
    for item, own in zip(work, owns, strict=True):
        request, plan = item.sequence.request, cast(Plan, item.plan)
        if request.sampling.changes_logits:
            answer = item.sequence.tokens[len(request.prompt) :]
            answers = [answer[: index - plan.review] for index in range(plan.review)]
            answers += [answer + drafts for drafts in plan.drafts_before()]
            places = (position_P[own] - len(request.prompt)).tolist()
            stop = request.stop_ids
            adjust(logits_PV[own], request.sampling, request.prompt, answers, places, stop)
        if item.sequence.grammar:
            allowed_RV = item.sequence.grammar.allowed(plan.review, plan.drafts)
            forbidden_RV = _upload(torch.from_numpy(~allowed_RV), logits_PV.device)
            logits_PV[own][: len(allowed_RV)].masked_fill_(forbidden_RV, -torch.inf)


def _sample(
    logits_PV: Tensor, work: Several[Work], owns: Several[slice], position_P: Tensor
) -> None:
    """Turn logits into scores, in place; greedy ones are that already.

    Requests whose sampling differs by nothing but the seed are scored together.
    """
    alike = defaultdict(list)
    for item, own in zip(work, owns, strict=True):
        sampling = item.sequence.request.sampling
        if sampling.temperature > 0:
            key = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
            alike[key].append((sampling, np.arange(own.start, own.stop)))
    for members in alike.values():
        index_X = torch.from_numpy(np.concatenate([rows for _, rows in members]))
        seed_X = torch.tensor([sampling.seed for sampling, rows in members for _ in rows])
        seed_X = _upload(seed_X, logits_PV.device)
        position_X = _upload(position_P[index_X], logits_PV.device)
        index_X = _upload(index_X, logits_PV.device)
        scores_XV = scores(logits_PV[index_X], members[0][0], position_X, seed_X)
        logits_PV.index_copy_(0, index_X, scores_XV)


def _drafts(plans: Several[Plan], rows: int) -> np.ndarray:
    """The draft after each row, 0 where there is none."""
    draft_P = np.zeros(rows, np.int64)
    row = 0
    for plan in plans:
        row += plan.review
        draft_P[row : row + len(plan.drafts)] = plan.drafts
        row += 1 + plan.rows
    return draft_P
