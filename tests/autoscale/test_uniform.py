"""Windows that are the same for all: arithmetic against simulation, and what is allowed."""

import random

import pytest

from mars_ray.autoscale.service_model import Uniform, all_uniform, expected

RATES = [0.9, 0.8, 0.7, 0.6]


@pytest.mark.parametrize("uniform", [Uniform(0, 1), Uniform(1, 1), Uniform(4, 1), Uniform(4, 5)])
def test_expected_yield_is_what_a_simulation_gives(uniform):
    """One group behind all drafts, and a group for every outcome."""
    draw = random.Random(0)
    tokens = rows = 0
    forwards = 100_000
    drafts = 0
    for _ in range(forwards):
        accepted = 0
        while accepted < drafts and draw.random() < RATES[accepted]:
            accepted += 1
        groups = uniform.groups if drafts else 1
        rows += 1 + drafts + groups * uniform.window
        tokens += 1 + accepted
        has_masks = uniform.groups > 1 or accepted == drafts
        drafts = uniform.window if has_masks else 0
    each = expected(uniform, RATES)
    assert each.tokens == pytest.approx(tokens / forwards, rel=0.01)
    assert each.rows == pytest.approx(rows / forwards, rel=0.01)


def test_some_groups_lie_between_one_and_all():
    """More outcomes covered, more tokens and more rows."""
    yields = [expected(Uniform(4, groups), RATES) for groups in (1, 2, 3, 5)]
    assert sorted(yields, key=lambda each: each.tokens) == yields
    assert sorted(yields, key=lambda each: each.rows) == yields


def test_choices_keep_to_what_is_allowed():
    """Steps that fit."""
    assert all_uniform(2, 5) == [Uniform(0, 1), Uniform(1, 1), Uniform(1, 2), Uniform(2, 1)]
