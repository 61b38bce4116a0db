"""From conversations to a batch of padded rows.

Shape suffixes: B rows, L tokens of a row.
"""

from collections.abc import Sequence

import numpy as np
import torch

from mars_ray.core.layout import TokenBatch
from mars_ray.data.chat import Encoded

Row = Sequence[tuple[int, Encoded]]


def collate(rows: Sequence[Row]) -> TokenBatch:
    """Right-pads rows to the longest; a row is its conversations with their data-set indices.

    A row without conversations is all padding: it takes part in a forward and counts for nothing.
    """
    lengths = [sum(len(encoded.input_ids) for _, encoded in row) for row in rows]
    shape = len(rows), max([1, *lengths])
    input_ids_BL = np.zeros(shape, np.int64)
    document_BL = np.full(shape, -1, np.int64)
    position_BL = np.zeros(shape, np.int64)
    response_BL = np.zeros(shape, np.bool_)
    for b, row in enumerate(rows):
        start = 0
        for index, encoded in row:
            end = start + len(encoded.input_ids)
            input_ids_BL[b, start:end] = encoded.input_ids
            document_BL[b, start:end] = index
            position_BL[b, start:end] = np.arange(end - start)
            response_BL[b, start:end] = encoded.response
            start = end
    return TokenBatch(
        input_ids_BL=torch.from_numpy(input_ids_BL),
        document_BL=torch.from_numpy(document_BL),
        position_BL=torch.from_numpy(position_BL),
        response_BL=torch.from_numpy(response_BL),
    )
