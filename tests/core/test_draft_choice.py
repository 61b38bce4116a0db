"""The choice of drafts and masks: against all choices there are, and at the ends of the price."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.core.tree import Choice, Prospects, best_choice, chain

PROBABILITY = st.floats(0, 1)


def chain_choice(
    accept: list[float], rooms: list[int], prospects: Prospects, groups: int | None = None
) -> Choice:
    return best_choice(accept, rooms, prospects, groups, chain(len(accept)))


def value(choice: Choice, accept: list[float], prospects: Prospects, worth: list[float]) -> float:
    """Tokens of this step's drafts and of the steps behind it, beyond the price of their rows."""
    price, onward = prospects.price, prospects.masks(1.0, 2)[1] - prospects.gain
    survival, total = 1.0, 0.0
    likelihoods = []
    for probability in accept[: choice.drafts]:
        likelihoods.append(survival * (1 - probability))
        survival *= probability
        total += survival - price
    for likelihood, masks in zip([*likelihoods, survival], choice.masks, strict=True):
        total += sum(likelihood * beyond - price for beyond in worth[:masks])
        total += likelihood * onward * (masks > 0)
    return total


@given(
    accept=st.lists(PROBABILITY, max_size=3),
    worth=st.lists(PROBABILITY, min_size=2, max_size=2).map(lambda r: sorted(r, reverse=True)),
    price=st.floats(0.01, 1.2),
    lasting=PROBABILITY,
    rooms=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    groups=st.sampled_from([None, 1, 2, 3]),
)
def test_no_other_choice_is_better(accept, worth, price, lasting, rooms, groups):
    """All drafts and masks that there may be, one by one."""
    rooms = rooms[: len(accept) + 1]
    prospects = Prospects(worth, price, lasting, price)
    best = chain_choice(accept, rooms, prospects, groups)
    assert all(masks <= room for masks, room in zip(best.masks, rooms, strict=False))
    others = [
        value(Choice(count, masks), accept, prospects, worth)
        for count in range(len(accept) + 1)
        for masks in product(*(range(room + 1) for room in rooms[: count + 1]))
        if groups is None or sum(own > 0 for own in masks[:-1]) < groups
    ]
    assert value(best, accept, prospects, worth) == pytest.approx(max(others), abs=1e-9)
    assert best.value == pytest.approx(max(others), abs=1e-9)


def test_a_doubtful_draft_is_left_out():
    """Though likely accepted: rejected, it would end the step where no masks are."""
    rooms = [4] * 3
    accept = [0.99, 0.6]
    dear, cheap = (
        Prospects([0.6, 0.5, 0.4, 0.3], 0.3, 1.0, 0.3),
        Prospects([0.8, 0.7, 0.6, 0.5], 0.1, 1.0, 0.1),
    )
    assert chain_choice(accept, rooms, dear) == Choice(1, (0, 3))
    assert chain_choice(accept, rooms, cheap) == Choice(2, (0, 4, 4))
    # Without masks there is nothing to lose.
    assert chain_choice(accept, [0, 0, 0], dear) == Choice(2, (0, 0, 0))


def test_masks_that_do_not_last_are_still_worth_having():
    """Guards decoding without masks for good, because drafts are checked without any behind.

    Then every other step has drafts: what masks bring is shared by two steps, and so is their
    price. Behind a doubtful outcome they are worth less.
    """
    lasting, not_lasting = (Prospects([0.5, 0.4], 0.3, share, 0.3) for share in (1.0, 0.0))
    assert lasting.masks(1.0, 2) == (2, pytest.approx(0.3))
    assert not_lasting.masks(1.0, 2) == (2, pytest.approx(0.15))
    assert [prospects.masks(0.7, 2)[0] for prospects in (lasting, not_lasting)] == [1, 0]


def test_rows_by_their_price():
    """Free rows are all used, dear ones not at all."""
    worth, rooms = [0.6, 0.2], [2, 2]
    assert chain_choice([0.5], rooms, Prospects(worth, 0.0, 1.0, 0.0)) == Choice(1, (2, 2))
    assert chain_choice([0.5], rooms, Prospects(worth, 1.0, 1.0, 1.0)) == Choice(0, (0,))
    assert chain_choice([], [2], Prospects(worth, 0.3, 1.0, 0.3)) == Choice(0, (1,))
    assert chain_choice([], [2], Prospects(worth, 0.7, 1.0, 0.7)) == Choice(0, (0,))


def test_no_more_groups_than_asked_for():
    """Those that bring most."""
    accept, rooms = [0.6, 0.6], [2, 2, 2]
    prospects = Prospects([0.9, 0.8], 0.01, 1.0, 0.01)
    assert chain_choice(accept, rooms, prospects) == Choice(2, (2, 2, 2))
    for groups in (1, 2):
        masks = chain_choice(accept, rooms, prospects, groups).masks
        assert sum(count > 0 for count in masks) <= groups
        assert masks[-1] == 2
    assert chain_choice(accept, rooms, prospects, 2) == Choice(1, (2, 2))
