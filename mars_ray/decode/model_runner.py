"""One forward over the rows of many sequences, laid end to end.

Only attention needs to know where a sequence ends. So a prompt's chunk and single decoding rows
share all matrix products, without padding.

Shape suffixes: N rows of a forward.
"""

from collections.abc import Sequence

import numpy as np
import torch

from mars_ray.decode.attention.backend import Backend
from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.sampler import Sampler
from mars_ray.decode.scheduler import Work


@torch.inference_mode()
def forward(backend: Backend, work: Sequence[Work], mask_token_id: int | None) -> Sampler:
    """Forward [pending | drafts | masks] of every sequence; the sampler reads the rows.

    Raises EngineError if the model's results are not finite, or the sampler does (`Backend`).
    """
    tables = Tables.of(work, backend.cache.page_size)
    position_N = tables.positions()
    # An adapter identifies masks by their depths.
    groups = [group for item in work if item.plan for group in item.plan.groups]
    depths = [depth for group in groups for depth in range(group.masks)]
    masks = depths if backend.adapter else [mask_token_id or 0] * tables.masks
    ids: list[int] = []
    for item in work:
        sequence = item.sequence
        ids += sequence.tokens[sequence.cached : sequence.cached + item.count]
        ids += item.plan.drafts if item.plan else ()
    backend.forward(tables, np.array(ids + masks), position_N)
    return Sampler(backend, work, tables, position_N, mask_token_id)
