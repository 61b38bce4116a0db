"""Batches of padded rows, in an order that depends on the seed alone, not on ranks or restarts.

Shape suffixes: B rows, L tokens of a row.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mars_ray.core.layout import TokenBatch
from mars_ray.data.rows import Conversations
from mars_ray.errors import DataError

# This many global batches are sorted by length together: enough for the rows of a batch to have
# similar lengths, few enough for the order to stay random.
_SORTED_BATCHES = 16
# Rows being filled at the same time: more fill better, and take longer to search.
_OPEN_ROWS = 256


@dataclass(frozen=True, slots=True)
class LoaderState:
    """The next optimizer step of an epoch, both counted from 0."""

    epoch: int
    step: int


class Loader:
    """Endless training batches: epochs in new orders, each without its incomplete last batch.

    `global_batch_size` counts rows over all ranks: the number of ranks does not change the content
    of a global batch. At most `micro_batch_size` rows go through one forward on one rank. All ranks
    get the same number of micro-batches: if the rows do not divide evenly, some ranks have one row
    less, or one of padding. With `state` and `restore` a run resumes with exactly the batches it
    would have had; to get there only lengths are read.
    """

    def __init__(
        self,
        conversations: Conversations,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        packing: bool,
        max_length: int,
    ) -> None:
        """Raises DataError if there are fewer rows than one global batch."""
        lengths = conversations.lengths
        self._conversations = conversations
        one_each = Rows(np.arange(len(lengths)), np.arange(len(lengths) + 1))
        self._rows = pack(lengths, max_length, seed) if packing else one_each
        self._row_lengths = np.add.reduceat(lengths[self._rows.members], self._rows.starts[:-1])
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._epoch = 0
        self._step = 0

        self.steps_per_epoch = len(self._rows) // global_batch_size
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the data set has {len(self._rows)} rows, fewer than one global batch of "
                f"{global_batch_size}; lower global_batch_size or add data"
            )

    def state(self) -> LoaderState:
        """The position after the last step handed out."""
        return LoaderState(self._epoch, self._step)

    def restore(self, state: LoaderState) -> None:
        """Goes to a position; only before the first batch is requested."""
        if state.epoch < 0 or not 0 <= state.step <= self.steps_per_epoch:
            raise DataError(
                f"the data set has {self.steps_per_epoch} steps an epoch, so it is not the one "
                f"whose training stopped at step {state.step}"
            )
        self._epoch, self._step = state.epoch, state.step

    def __iter__(self) -> Iterator[list[TokenBatch]]:
        """Yields this rank's micro-batches, one optimizer step at a time."""

        while True:
            batches = self._order(self._epoch)
            while self._step < self.steps_per_epoch:
                # Counted before it is handed out: a caller that reads `state` has the batch.
                self._step += 1
                yield self._micro_batches(batches[self._step - 1])
            self._epoch, self._step = self._epoch + 1, 0

    def _order(self, epoch: int) -> np.ndarray:
        """Rows of every global batch of an epoch, (steps_per_epoch, global_batch_size).

        Rows of similar length share a batch, so that there is little padding. The batches of an
        epoch are then shuffled, because otherwise long ones would follow short ones.
        """
        random = np.random.default_rng([self._seed, epoch])
        size = self._global_batch_size
        order = random.permutation(len(self._rows))[: self.steps_per_epoch * size]
        for start in range(0, len(order), _SORTED_BATCHES * size):
            part = order[start : start + _SORTED_BATCHES * size]
            part[:] = part[np.argsort(self._row_lengths[part], kind="stable")]
        return random.permutation(order.reshape(self.steps_per_epoch, size), axis=0)

    def _micro_batches(self, batch: np.ndarray) -> list[TokenBatch]:
        # Every world_size-th row, so that the ranks get rows of similar lengths and equal work.
        mine = batch[self._rank :: self._world_size]
        share = math.ceil(self._global_batch_size / self._world_size)
        starts = range(0, share, self._micro_batch_size)
        parts = [mine[start : start + self._micro_batch_size] for start in starts]
        return [
            collate(self._conversations, [self._rows.row(row) for row in rows] or [[]])
            for rows in parts
        ]


def eval_batches(
    conversations: Conversations,
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    limit: int | None,
) -> Iterator[TokenBatch]:
    """The first `limit` conversations (None: all), each once over all ranks, without packing.

    Every rank yields the same number of batches, as collective operations require; a rank that has
    no conversations left yields one row of padding.
    """
    count = len(conversations) if limit is None else min(limit, len(conversations))
    order = np.argsort(conversations.lengths[:count], kind="stable")
    mine = order[rank::world_size].tolist()
    for batch in range(math.ceil(math.ceil(count / world_size) / micro_batch_size)):
        part = mine[batch * micro_batch_size : (batch + 1) * micro_batch_size]
        yield collate(conversations, [[index] for index in part] or [[]])


@dataclass(frozen=True, slots=True)
class Rows:
    """Row r holds the conversations `members[starts[r]:starts[r + 1]]`."""

    members: np.ndarray  # int64, every conversation once
    starts: np.ndarray  # int64, one more than there are rows

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> list[int]:
        return self.members[self.starts[index] : self.starts[index + 1]].tolist()


def pack(lengths: np.ndarray, max_length: int, seed: int) -> Rows:
    """Rows of at most `max_length` tokens: each conversation into the first open row with room.

    Conversations come in random order, so that a row mixes all kinds. The assignment to rows is the
    same in every epoch, and so is the number of steps. The attention mask keeps the conversations
    of a row from seeing one another.
    """

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


def collate(conversations: Conversations, rows: Sequence[Sequence[int]]) -> TokenBatch:
    """Right-pads rows to the longest; a row is the indices of its conversations.

    A row without conversations is all padding: it takes part in a forward and counts for nothing.
    """
    lengths = [sum(conversations.lengths[index] for index in row) for row in rows]
    shape = len(rows), max([1, *lengths])
    input_ids_BL = np.zeros(shape, np.int64)
    document_BL = np.full(shape, -1, np.int64)
    position_BL = np.zeros(shape, np.int64)
    response_BL = np.zeros(shape, np.bool_)
    for b, row in enumerate(rows):
        start = 0
        for index in row:
            encoded = conversations[index]
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
