"""From logits to scores whose argmax is the token, as each request asks, in few operations.

Shape suffixes: P rows that are scored, X some of them, V vocabulary, R rows of one request.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mars_ray.config.decode import Sampling
from mars_ray.core.sampling import adjust, scores
from mars_ray.decode.request import Request

# Takes the place of the best token in a row whose scores are not numbers.
NOT_A_NUMBER = -1


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one request, among those that are scored."""

    request: Request
    own: slice
    # The answer's tokens before each row; not needed if the request changes no logits.
    answers: list[list[int]] = field(default_factory=list)
    allowed_RV: NDArray[np.bool_] | None = None  # by its grammar, for the first rows


def adjust_all(logits_PV: Tensor, blocks: Sequence[Block], position_P: np.ndarray) -> None:
    """Apply penalties, biases and grammars of the requests that have them, in place."""
    for block in blocks:
        request, own = block.request, block.own
        if request.sampling.changes_logits:
            places = (position_P[own] - len(request.prompt)).tolist()
            adjust(
                logits_PV[own],
                request.sampling,
                request.prompt,
                block.answers,
                places,
                request.stop_ids,
            )
        if block.allowed_RV is not None:
            forbidden_RV = upload(torch.from_numpy(~block.allowed_RV), logits_PV.device)
            logits_PV[own][: len(forbidden_RV)].masked_fill_(forbidden_RV, -torch.inf)


def sample(
    logits_PV: Tensor,
    blocks: Sequence[Block],
    position_P: np.ndarray,
    token_PV: Tensor | None = None,
) -> None:
    """Add each request's noise, in place; logits of greedy requests are scores already.

    Requests whose sampling differs only in the seed are scored together. `token_PV` is as in
    `core.sampling.scores`.
    """
    alike: dict[tuple, list[tuple[Sampling, np.ndarray]]] = defaultdict(list)
    for block in blocks:
        sampling = block.request.sampling
        if sampling.temperature > 0:
            key = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
            alike[key].append((sampling, np.arange(block.own.start, block.own.stop)))
    device = logits_PV.device
    for members in alike.values():
        index = np.concatenate([rows for _, rows in members])
        seed_X = torch.tensor([sampling.seed for sampling, rows in members for _ in rows])
        seed_X, position_X, index_X = (
            upload(each, device)
            for each in (seed_X, torch.from_numpy(position_P[index]), torch.from_numpy(index))
        )
        token_XV = None if token_PV is None else token_PV[index_X]
        scores_XV = scores(logits_PV[index_X], members[0][0], position_X, seed_X, token_XV)
        logits_PV.index_copy_(0, index_X, scores_XV)


def best(scores_PV: Tensor, draft_P: np.ndarray, parent_P: np.ndarray) -> tuple[Tensor, Tensor]:
    """Each row's best token, and each draft's probability relative to the best token of its
    parent's row."""
    best_P = scores_PV.argmax(dim=-1)
    draft, parent = (
        upload(torch.from_numpy(each), scores_PV.device) for each in (draft_P, parent_P)
    )
    most_P = scores_PV.gather(-1, best_P[:, None]).squeeze(-1)
    ratio_P = (scores_PV[parent, draft] - most_P[parent]).exp()
    return best_P.masked_fill(most_P.isnan(), NOT_A_NUMBER), ratio_P


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it, because the forward is still running there."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
