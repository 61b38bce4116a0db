"""Rows of tokens as the data loader hands them to the core.

Shape suffixes: B rows, L tokens of a row.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """B right-padded rows of L tokens; a row holds one conversation, or several when packed.

    `document_BL` is the conversation's index in its data set, -1 on padding: it keeps packed
    conversations apart and is the key of every random draw made for them.
    """

    input_ids_BL: Tensor  # int64
    document_BL: Tensor  # int64
    position_BL: Tensor  # int64, position inside the conversation; 0 on padding
    response_BL: Tensor  # bool, the token belongs to an assistant turn
