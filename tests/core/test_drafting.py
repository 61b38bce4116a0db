"""The choice of drafts and masks: against all choices there are, and at the ends of the price."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.core.drafting import Choice, Prospects, best_choice

PROBABILITY = st.floats(0, 1)


def worth(choice: Choice, accept: list[float], reach: list[float], price: float) -> float:
    """Tokens of this step's drafts and of the next step's, beyond the price of all their rows."""
    survival, total = 1.0, 0.0
    likelihoods = []
    for probability in accept[: choice.drafts]:
        likelihoods.append(survival * (1 - probability))
        survival *= probability
        total += survival - price
    for likelihood, masks in zip([*likelihoods, survival], choice.masks, strict=True):
        total += sum(likelihood * (reached - price) - price for reached in reach[:masks])
    return total


@given(
    accept=st.lists(PROBABILITY, max_size=3),
    reach=st.lists(PROBABILITY, min_size=2, max_size=2).map(lambda r: sorted(r, reverse=True)),
    price=st.floats(0.01, 1.2),
    rooms=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    groups=st.sampled_from([None, 1, 2, 3]),
)
def test_no_other_choice_is_better(accept, reach, price, rooms, groups):
    """All drafts and masks that there may be, one by one."""
    rooms = rooms[: len(accept) + 1]
    best = best_choice(accept, rooms, Prospects(reach, price), groups)
    assert all(masks <= room for masks, room in zip(best.masks, rooms, strict=False))
    others = [
        worth(Choice(count, masks), accept, reach, price)
        for count in range(len(accept) + 1)
        for masks in product(*(range(room + 1) for room in rooms[: count + 1]))
        if groups is None or sum(own > 0 for own in masks[:-1]) < groups
    ]
    assert worth(best, accept, reach, price) == pytest.approx(max(others), abs=1e-9)


def test_a_doubtful_draft_is_left_out():
    """Though likely accepted: rejected, it would end the step where no masks are."""
    reach = [0.9, 0.8, 0.7, 0.6]
    rooms = [4] * 3
    accept = [0.99, 0.6]
    assert best_choice(accept, rooms, Prospects(reach, 0.3)) == Choice(1, (0, 3))
    assert best_choice(accept, rooms, Prospects(reach, 0.1)) == Choice(2, (0, 4, 4))
    # Without masks there is nothing to lose.
    assert best_choice(accept, [0, 0, 0], Prospects(reach, 0.3)) == Choice(2, (0, 0, 0))


def test_rows_by_their_price():
    """Free rows are all used, dear ones not at all."""
    reach, rooms = [0.9, 0.5], [2, 2]
    assert best_choice([0.5], rooms, Prospects(reach, 0.0)) == Choice(1, (2, 2))
    assert best_choice([0.5], rooms, Prospects(reach, 1.0)) == Choice(0, (0,))
    assert best_choice([], [2], Prospects(reach, 0.3)) == Choice(0, (1,))
    assert best_choice([], [2], Prospects(reach, 0.5)) == Choice(0, (0,))


def test_no_more_groups_than_asked_for():
    """Those that bring most."""
    accept, rooms = [0.6, 0.6], [2, 2, 2]
    prospects = Prospects([0.9, 0.8], 0.01)
    assert best_choice(accept, rooms, prospects) == Choice(2, (2, 2, 2))
    for groups in (1, 2):
        masks = best_choice(accept, rooms, prospects, groups).masks
        assert sum(count > 0 for count in masks) <= groups
        assert masks[-1] == 2
    assert best_choice(accept, rooms, prospects, 2) == Choice(1, (2, 2))
