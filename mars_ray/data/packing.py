"""Which conversations share a row of tokens."""

from dataclasses import dataclass

import numpy as np

# Rows being filled at the same time: more fill better, and take longer to search.
_OPEN_ROWS = 256


@dataclass(frozen=True, slots=True)
class Rows:
    """Row r holds the conversations `members[starts[r]:starts[r + 1]]`."""

    members: np.ndarray  # int64, every conversation once
    starts: np.ndarray  # int64, one more than there are rows

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> list[int]:
        """The conversations of one row."""
        return self.members[self.starts[index] : self.starts[index + 1]].tolist()


def one_each(lengths: np.ndarray) -> Rows:
    """No packing."""
    return Rows(np.arange(len(lengths)), np.arange(len(lengths) + 1))


def pack(lengths: np.ndarray, max_length: int, seed: int) -> Rows:
    """Rows of at most `max_length` tokens: each conversation into the first open row with room.

    They come in random order, so that a row mixes all kinds. Which row a conversation is in is the
    same in every epoch: the number of steps then is, too, and the attention mask keeps the
    conversations of a row from seeing one another.
    """
    assert lengths.max(initial=0) <= max_length
    space = np.full(_OPEN_ROWS, max_length)
    open_rows: list[list[int]] = [[] for _ in range(_OPEN_ROWS)]
    closed: list[list[int]] = []
    for index in np.random.default_rng([seed]).permutation(len(lengths)).tolist():
        length = lengths[index]
        place = int(np.argmax(space >= length))
        if space[place] < length:
            place = int(np.argmin(space))
            closed.append(open_rows[place])
            open_rows[place], space[place] = [], max_length
        open_rows[place].append(index)
        space[place] -= length
    rows = [row for row in closed + open_rows if row]
    sizes = [len(row) for row in rows]
    members = np.array([index for row in rows for index in row], np.int64)
    return Rows(members, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))
