import numpy as np
import torch

from mars_ray.data.chat import Encoded
from mars_ray.data.loader import collate


class Toys(dict):
    @property
    def lengths(self):
        return {index: len(encoded.input_ids) for index, encoded in self.items()}


def conversation(*tokens, response):
    return Encoded(np.array(tokens, np.int32), np.array([t in response for t in tokens]))


def test_rows_are_padded_and_packed():
    """By hand: positions start anew in each conversation, padding is document -1."""
    a = conversation(5, 6, 7, response={7})
    b = conversation(8, 9, response={9})
    c = conversation(4, response=set())
    batch = collate(Toys({3: a, 0: b, 9: c}), [[3, 0], [9]])
    assert batch.input_ids_BL.tolist() == [[5, 6, 7, 8, 9], [4, 0, 0, 0, 0]]
    assert batch.document_BL.tolist() == [[3, 3, 3, 0, 0], [9, -1, -1, -1, -1]]
    assert batch.position_BL.tolist() == [[0, 1, 2, 0, 1], [0, 0, 0, 0, 0]]
    assert batch.response_BL.tolist() == [[False, False, True, False, True], [False] * 5]
    assert batch.input_ids_BL.dtype == batch.document_BL.dtype == torch.int64
    assert batch.response_BL.dtype == torch.bool


def test_a_row_without_conversations_is_padding():
    """A rank that has run out of rows still takes part in the forward."""
    batch = collate(Toys(), [[]])
    assert batch.input_ids_BL.shape == (1, 1)
    assert batch.document_BL.tolist() == [[-1]]
    assert not batch.response_BL.any()
