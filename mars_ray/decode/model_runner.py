"""One forward over the rows of many sequences, laid end to end.

Only attention needs to know where a sequence ends. So a prompt's chunk and single decoding rows
share all matrix products, without padding.

Shape suffixes: N rows of a forward.
"""

import math
from collections.abc import Sequence as Several

import numpy as np
import torch

from mars_ray.decode.attention.backend import Backend
from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.sampler import Sampler
from mars_ray.decode.scheduler import Work
from mars_ray.errors import EngineError


def nothing() -> None:
    """Do nothing while a device works."""


@torch.inference_mode()
def forward(backend: Backend, work: Several[Work], mask_token_id: int | None) -> Sampler:
    """Forward [pending | drafts | masks] of every sequence; the sampler reads the rows.

    Raises EngineError if the model's results are not finite; on a GPU the sampler raises it.
    """
    tables = Tables.of(work, backend.cache.page_size)
    position_N = tables.positions()
    # An adapter identifies masks by their depths.
    masks = _depths(work) if backend.runner.adapter else [mask_token_id or 0] * tables.masks
    ids = [token for item in work for token in _tokens(item)]
    hidden_NH = backend.hidden_states(tables, np.array(ids + masks), position_N)
    # This also checks rows that nobody reads. On a GPU the check would wait for the device, so
    # there only the rows that are read are checked (`sampler.py`).
    if hidden_NH.device.type == "cpu" and not math.isfinite(float(hidden_NH.sum())):
        # Hidden values are multiplied by 0, and 0 * NaN is NaN.
        backend.cache.clear(tables.places(backend.cache.page_size))
        raise EngineError("the model gives numbers that are none")
    position_N = torch.from_numpy(position_N)
    return Sampler(backend.runner, hidden_NH, work, tables, position_N, mask_token_id)


def _tokens(item: Work) -> list[int]:
    sequence, plan = item.sequence, item.plan
    real = sequence.tokens[sequence.cached : sequence.cached + item.count]
    return [*real, *plan.drafts] if plan else real


def _depths(work: Several[Work]) -> list[int]:
    plans = [item.plan for item in work if item.plan]
    return [depth for plan in plans for group in plan.groups for depth in range(group.masks)]
