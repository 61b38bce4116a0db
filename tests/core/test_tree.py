"""Trees of drafts, worked by hand, and the choice among them against the rule for chains."""

from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.core.tree import (
    Choice,
    Prospects,
    best_choice,
    chain,
    children_of,
    depths_of,
    fan,
    first_chain,
    likeliest_outcomes,
    path_to,
    reaches_of,
    renumbered,
)
from mars_ray.decode.drafts import DraftStats

# Two chains of two drafts, and a third draft behind the first draft of the second chain.
TREE = [0, 1, 0, 3, 3]


def test_the_numbers_of_a_tree():
    """Everything that is read off the parents."""
    assert [path_to(TREE, node) for node in range(6)] == [[], [1], [1, 2], [3], [3, 4], [3, 5]]
    assert depths_of(TREE) == [0, 1, 2, 1, 2, 2]
    assert children_of(TREE) == [[1, 3], [2], [], [4, 5], [], []]
    assert reaches_of(TREE, [0.5, 0.5, 0.25, 0.5, 0.0]) == [1, 0.5, 0.25, 0.25, 0.125, 0]
    assert first_chain(TREE) == 2
    assert renumbered(TREE, [1, 3, 5]) == [0, 0, 2]
    assert fan(2, 3) == [0, 1, 2, 0, 4, 5]
    assert fan(1, 3) == chain(3)
    assert first_chain(chain(3)) == 3


def test_the_likeliest_ends_of_a_tree():
    """Of the nodes 0 to 5: 0.25, 0.25, 0.25, 0.125, 0.125, 0; ties go to the larger."""
    accept = [0.5, 0.5, 0.25, 0.5, 0.0]
    assert likeliest_outcomes(accept, 9, TREE) == [2, 1, 0, 4, 3, 5]
    # Nothing is left of node 0, whatever rounding leaves of it.
    assert likeliest_outcomes([0.7, 0.2, 0.1 - 1e-9], 9, [0, 0, 0]) == [1, 2, 3, 0]


def chain_choice(
    accept: list[float], rooms: list[int], prospects: Prospects, groups: int | None
) -> tuple[int, float]:
    """The best number of drafts of a chain, and its value: every number is tried."""
    values = []
    for count in range(len(accept) + 1):
        survivals = [1.0, *accumulate(accept[:count], mul)]
        if survivals[-1] <= prospects.price and count:
            break
        ends = [a - b for a, b in zip(survivals, [*survivals[1:], 0.0], strict=True)]
        gains = [prospects.masks(end, room)[1] for end, room in zip(ends, rooms, strict=False)]
        before = sorted(gains[:-1], reverse=True)[: None if groups is None else groups - 1]
        checked = sum(survival - prospects.price for survival in survivals[1:])
        values.append(checked + sum(before) + gains[-1])
    best = max(values)
    return values.index(best), best


WORTH = st.lists(st.floats(0, 1), min_size=3, max_size=3).map(lambda r: sorted(r, reverse=True))


@given(
    accept=st.lists(st.floats(0, 1), max_size=6),
    worth=WORTH,
    price=st.floats(0.01, 1.2),
    lasting=st.floats(0, 1),
    rooms=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    groups=st.sampled_from([None, 1, 2, 4]),
)
def test_a_chain_is_chosen_as_ever(accept, worth, price, lasting, rooms, groups):
    """As many of its first drafts as bring most; nodes are counts."""
    prospects = Prospects(worth, price, lasting, price)
    choice = best_choice(accept, rooms[: len(accept) + 1], prospects, groups, chain(len(accept)))
    count, value = chain_choice(accept, rooms, prospects, groups)
    assert choice.value == pytest.approx(value, abs=1e-9)
    assert choice.nodes == tuple(range(1, choice.drafts + 1))
    if choice.drafts != count:
        shorter = best_choice(accept[:count], rooms[: count + 1], prospects, groups, chain(count))
        assert shorter.value == pytest.approx(value, abs=1e-9)


def tree_value(choice: Choice, accept, parents, prospects: Prospects, worth) -> float:
    """Of any choice, mask by mask."""
    reached = reaches_of(parents, accept)
    onward = prospects.masks(1.0, len(worth))[1] - prospects.gain
    total = 0.0
    for node, masks in zip((0, *choice.nodes), choice.masks, strict=True):
        left = reached[node] - sum(reached[n] for n in choice.nodes if parents[n - 1] == node)
        total += (reached[node] - prospects.price) * (node > 0)
        total += sum(left * beyond - prospects.price for beyond in worth[:masks])
        total += left * onward * (masks > 0)
    return total


@given(
    splits=st.lists(st.tuples(st.integers(0, 20), st.floats(0, 0.5)), max_size=9),
    worth=WORTH,
    price=st.floats(0.01, 0.6),
    groups=st.sampled_from([None, 1, 3]),
)
def test_a_tree_is_chosen_whole(splits, worth, price, groups):
    """No draft without its parent, none that is not worth a row; the value is that of the rows."""
    parents = [parent % (node + 1) for node, (parent, _) in enumerate(splits)]
    accept = [probability for _, probability in splits]
    prospects = Prospects(worth, price, 1.0, price)
    choice = best_choice(accept, [3] * (len(accept) + 1), prospects, groups, parents)
    assert all(parents[node - 1] in (0, *choice.nodes) for node in choice.nodes)
    assert all(reaches_of(parents, accept)[node] > price for node in choice.nodes)
    assert groups is None or sum(own > 0 for own in choice.masks) <= groups
    assert choice.value == pytest.approx(
        tree_value(choice, accept, parents, prospects, worth), abs=1e-9
    )
    assert choice.value >= best_choice([], [3], prospects, groups, []).value


def test_an_alternative_is_chosen_if_it_pays():
    """The second first draft is worth its row, what follows it is not; masks stand behind both."""
    accept, parents = [0.6, 0.5, 0.3, 0.1], fan(2, 2)
    choice = best_choice(accept, [2] * 5, Prospects([0.9, 0.6], 0.1, 1.0, 0.1), None, parents)
    assert choice == Choice(3, (0, 2, 2, 2), nodes=(1, 2, 3))
    alone = best_choice(accept[:2], [2] * 3, Prospects([0.9, 0.6], 0.1, 1.0, 0.1), None, [0, 1])
    assert choice.value > alone.value
    # Dear rows: masks alone bring more, for no draft ends the step elsewhere.
    dear = Prospects([0.9, 0.6], 0.35, 1.0, 0.35)
    assert best_choice(accept, [2] * 5, dear, None, parents) == Choice(0, (2,))


def test_every_child_on_the_way_was_checked():
    """Those behind a rejected draft tell nothing."""
    known = DraftStats(2)
    for _ in range(2000):
        known.observe([0.97, 0.85, 0.45, 0.25, 0.15], 4, TREE)
    found = known.of([0.97, 0.85, 0.45, 0.25, 0.15])
    assert found == pytest.approx([0.0, 0.85, 1.0, 1.0, 0.0], abs=0.01)


def test_a_mask_makes_a_draft_in_every_branch():
    """Its worth is that of all of them."""
    known = DraftStats(2)
    prospects = Prospects(known.worth(0.1), 0.1, 1.0, 0.1)
    for _ in range(2000):
        likely, nothing = [0.65, 0.5, 0.25, 0.9], Choice(0, (0,))
        known.observe_drafts(likely, nothing, prospects, fan(2, 2), [None] * 4)
    assert known.worth(0.0) == pytest.approx([0.65 + 0.25, 0.35 + 0.25], abs=0.01)
    assert known.worth(0.3) == pytest.approx([0.35, 0.05], abs=0.01)
