"""One forward over the rows of many sequences, laid end to end.

Only attention knows where a sequence ends, so a prompt's chunk and single decoding rows share all
matrix products, and none is padded.

Shape suffixes: N rows of a forward.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Several
from itertools import chain

import numpy as np
import torch

from mars_ray.decode.attention.base import Backend
from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.reading import read
from mars_ray.decode.scheduler import Work
from mars_ray.decode.strategies.base import Rows
from mars_ray.errors import EngineError


def nothing() -> None:
    """What there is to do while a device works, if nobody says otherwise."""


@torch.inference_mode()
def forward(
    backend: Backend,
    work: Several[Work],
    mask_token_id: int | None,
    meanwhile: Callable[[], None] = nothing,
) -> list[Rows | None]:
    """Forward [pending | drafts | masks] of every sequence; the rows of those that have a plan.

    `meanwhile` is called once all is asked of the device, and before waiting for what it says.
    """
    tables = Tables.of(work, backend.cache.page_size)
    position_N = tables.positions()
    ids_N = np.array(list(chain.from_iterable(_tokens(item, mask_token_id) for item in work)))
    hidden_NH = backend.hidden_states(tables, ids_N, position_N)
    # Also of rows that nobody reads. To ask a GPU would be to wait for it: there those that are
    # read have to do (`reading.py`).
    if hidden_NH.device.type == "cpu" and not math.isfinite(float(hidden_NH.sum())):
        # What is hidden is multiplied by 0, and 0 * NaN is NaN.
        backend.cache.clear(tables.places(backend.cache.page_size))
        raise EngineError("the model gives numbers that are none")
    if not any(item.plan for item in work):
        meanwhile()
        return [None] * len(work)
    position_N = torch.from_numpy(position_N)
    rows = iter(read(backend.runner, hidden_NH, work, position_N, mask_token_id, meanwhile))
    return [next(rows) if item.plan else None for item in work]


def _tokens(item: Work, mask_token_id: int | None) -> list[int]:
    sequence, plan = item.sequence, item.plan
    real = sequence.tokens[sequence.cached : sequence.cached + item.count]
    if plan is None:
        return real
    return [*real, *plan.drafts, *([mask_token_id or 0] * (plan.rows - len(plan.drafts)))]
