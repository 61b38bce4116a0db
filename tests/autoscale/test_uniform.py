"""Windows that are the same for all: arithmetic against simulation, and what is allowed."""

import random

import pytest

from mars_ray.autoscale.service_model import all_uniform, expected

RATES = [0.9, 0.8, 0.7, 0.6]


@pytest.mark.parametrize(("window", "most"), [(0, 1), (1, 1), (4, 1), (4, 5)])
def test_expected_yield_is_what_a_simulation_gives(window, most):
    """One group behind all drafts, and a group for every outcome."""
    draw = random.Random(0)
    tokens = rows = 0
    forwards = 100_000
    drafts = 0
    for _ in range(forwards):
        accepted = 0
        while accepted < drafts and draw.random() < RATES[accepted]:
            accepted += 1
        groups = most if drafts else 1
        rows += 1 + drafts + groups * window
        tokens += 1 + accepted
        has_masks = most > 1 or accepted == drafts
        drafts = window if has_masks else 0
    seen = (tokens / forwards, rows / forwards)
    assert expected(window, most, RATES) == pytest.approx(seen, rel=0.01)


def test_some_groups_lie_between_one_and_all():
    """More outcomes covered, more tokens and more rows."""
    tokens, rows = zip(*(expected(4, groups, RATES) for groups in (1, 2, 3, 5)), strict=True)
    assert sorted(tokens) == list(tokens)
    assert sorted(rows) == list(rows)


def test_choices_keep_to_what_is_allowed():
    """Steps that fit."""
    assert all_uniform(2, 5) == [(0, 1), (1, 1), (1, 2), (2, 1)]
