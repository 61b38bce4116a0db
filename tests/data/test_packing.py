import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.data.loader import pack


@given(st.lists(st.integers(1, 20), min_size=1, max_size=300), st.integers(0, 3))
def test_every_conversation_is_in_one_row_that_holds_it(lengths, seed):
    """Guards against lost, doubled or cut conversations."""
    rows = pack(np.array(lengths), 20, seed)
    contents = [rows.row(index) for index in range(len(rows))]
    assert sorted(index for row in contents for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 20 for row in contents)


def test_rows_are_well_filled():
    """First fit wastes less than 10% here; one conversation a row would waste half."""
    lengths = np.random.default_rng(0).integers(10, 90, 5000)
    rows = pack(lengths, 100, 0)
    assert lengths.sum() / (len(rows) * 100) > 0.9


def test_the_seed_decides():
    """The same rows for the same seed, on any rank."""
    lengths = np.random.default_rng(0).integers(1, 50, 200)
    first, again, other = (pack(lengths, 64, seed).members.tolist() for seed in (1, 1, 2))
    assert first == again != other
