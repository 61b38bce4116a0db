from itertools import islice

import numpy as np
import pytest
import torch

from mars_ray.data.chat import Encoded
from mars_ray.data.loader import Loader, LoaderState, eval_batches
from mars_ray.errors import DataError


class Toy:
    """Conversations without a cache: the tokens of conversation i are all i."""

    def __init__(self, count):
        self.lengths = np.random.default_rng(0).integers(4, 60, count)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        length = self.lengths[index]
        return Encoded(np.full(length, index, np.int32), np.arange(length) > 2)


def make(toy, rank=0, world_size=1, **changed):
    settings = {"global_batch_size": 8, "micro_batch_size": 2, "seed": 5}
    settings |= {"packing": False, "max_length": 64}
    return Loader(toy, rank=rank, world_size=world_size, **(settings | changed))


def documents(batches):
    """The conversations in the micro-batches of one step."""
    return {int(index) for batch in batches for index in batch.document_BL.unique() if index >= 0}


def equal(left, right):
    return all(
        torch.equal(getattr(a, field), getattr(b, field))
        for a, b in zip(left, right, strict=True)
        for field in a.__dataclass_fields__
    )


def steps(toy, count, world_size=1, state=None, **changed):
    """The conversations of each global batch, gathered over all ranks."""
    ranks = [make(toy, rank, world_size, **changed) for rank in range(world_size)]
    for loader in ranks:
        if state is not None:
            loader.restore(state)
    return [set.union(*map(documents, each)) for each in islice(zip(*ranks, strict=True), count)]


@pytest.mark.parametrize("packing", [False, True])
def test_the_global_batch_does_not_depend_on_the_ranks(packing):
    """Guards "two ranks = one rank": the loss curve must not move with the cluster's size."""
    toy = Toy(203)
    changed = {"packing": packing, "micro_batch_size": 1}
    alone = steps(toy, 30, **changed)
    for world_size in (2, 4, 8):
        assert steps(toy, 30, world_size, **changed) == alone


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("stop", [0, 3, 25, 26, 40])
def test_a_restored_loader_goes_on_bit_for_bit(packing, stop):
    """Also at and after an epoch's end, where others have started the epoch again."""
    toy = Toy(203 if not packing else 500)
    loader = make(toy, packing=packing)
    whole = list(islice(loader, 60))
    first = make(toy, packing=packing)
    assert all(equal(a, b) for a, b in zip(islice(first, stop), whole, strict=False))
    resumed = make(toy, packing=packing)
    resumed.restore(first.state())
    rest = islice(resumed, 60 - stop)
    assert all(equal(a, b) for a, b in zip(rest, whole[stop:], strict=True))
    assert resumed.state() == loader.state()


def test_a_run_may_go_on_with_other_ranks():
    """The state is that of the job, not of a rank."""
    toy = Toy(203)
    loader = make(toy)
    list(islice(loader, 10))
    assert steps(toy, 20, 4, loader.state(), micro_batch_size=1) == steps(toy, 30)[10:]


@pytest.mark.parametrize("world_size", [3, 5, 7, 11])
def test_ranks_that_do_not_divide_the_batch_share_it(world_size):
    """Guards elastic runs: every row once, and as many forwards on each rank, or ZeRO-3 hangs."""
    toy = Toy(203)
    expected = steps(toy, 30)
    ranks = [make(toy, rank, world_size) for rank in range(world_size)]
    for each, wanted in zip(islice(zip(*ranks, strict=True), 30), expected, strict=False):
        found = [index for batches in each for index in documents(batches)]
        assert sorted(found) == sorted(wanted)
        assert len({len(batches) for batches in each}) == 1
        rows = [sum(batch.document_BL.shape[0] for batch in batches) for batches in each]
        assert max(rows) - min(rows) <= 1


def test_going_to_a_position_reads_nothing_on_the_way():
    """Guards an hour of reading a large data set again before the first step."""

    class Counted(Toy):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    toy = Counted(203)
    loader = make(toy)
    loader.restore(LoaderState(7, 20))
    assert toy.reads == 0
    next(iter(loader))
    assert toy.reads == 8


def test_an_epoch_has_every_row_at_most_once():
    """All but the remainder, another one each time; the next epoch has another order."""
    toy = Toy(203)
    loader = make(toy)
    assert loader.steps_per_epoch == 25
    epochs = [steps(toy, 75)[start : start + 25] for start in (0, 25, 50)]
    for epoch in epochs:
        assert sum(len(batch) for batch in epoch) == len(set.union(*epoch)) == 200
    assert epochs[0] != epochs[1]
    assert set.union(*epochs[0]) != set.union(*epochs[1])
    assert loader.state() == LoaderState(0, 0)
    list(islice(loader, 26))
    assert loader.state() == LoaderState(1, 1)


def test_rows_of_a_batch_have_similar_lengths():
    """Little padding; and batches are shuffled, so lengths do not rise over an epoch."""
    toy = Toy(2000)
    batches = [micro for step in islice(make(toy), 250) for micro in step]
    padding = sum((batch.document_BL < 0).sum().item() for batch in batches)
    assert padding / sum(batch.document_BL.numel() for batch in batches) < 0.06
    widths = np.array([batch.document_BL.shape[1] for batch in batches[::4]])
    assert abs(np.corrcoef(widths, np.arange(len(widths)))[0, 1]) < 0.25


def test_ranks_get_equal_shares():
    """So many micro-batches of so many rows, on each."""
    for rank in (0, 1):
        batches = next(iter(make(Toy(50), rank, 2)))
        assert [batch.input_ids_BL.shape[0] for batch in batches] == [2, 2]


def test_packed_rows_keep_their_conversations():
    """Positions and documents of a packed row are those of its conversations."""
    toy = Toy(300)
    for batch in next(iter(make(toy, packing=True))):
        assert batch.input_ids_BL.shape[1] <= 64
        real = batch.document_BL >= 0
        assert torch.equal(batch.input_ids_BL[real], batch.document_BL[real])
        for index in batch.document_BL[real].unique():
            positions = batch.position_BL[batch.document_BL == index]
            assert positions.tolist() == list(range(toy.lengths[index]))


def test_too_little_data_is_an_error():
    """Otherwise the first epoch would never end."""
    with pytest.raises(DataError, match="7 rows, fewer than one global batch of 8"):
        make(Toy(7))


def test_a_state_of_other_data_is_an_error():
    """A step that this data set does not have."""
    with pytest.raises(DataError, match="25 steps an epoch"):
        make(Toy(203)).restore(LoaderState(0, 26))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("limit", [None, 5, 7, 100])
def test_evaluation_sees_each_row_once(world_size, limit):
    """On all ranks together, with equally many batches on each, or a collective would hang."""
    toy = Toy(23)
    settings = {"micro_batch_size": 3, "world_size": world_size, "limit": limit}
    ranks = [list(eval_batches(toy, rank=rank, **settings)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    seen = [index for batches in ranks for batch in batches for index in documents([batch])]
    assert sorted(seen) == list(range(min(limit or 23, 23)))
