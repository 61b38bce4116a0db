"""The size of a step: hand-worked numbers, its bounds, and what it says of a number that is set."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.autoscale.service_model import (
    Level,
    ServiceModel,
    Shape,
    contradiction,
    least_rows,
    step_rows,
)

# 4 ms up to 100 rows, then 40 us each; a cached token costs 10 ns.
MODEL = ServiceModel(
    "toy",
    ((1, 0.004), (100, 0.004), (1000, 0.04)),
    (Level(1.0, 0.0, (Shape(1, 3.0, 1.5), Shape(4, 20.5, 2.5))),),
    64,
    cache_token_s=1e-8,
)


def test_hand_worked_rows():
    """85% of 10 ms are 8.5 ms: 100 rows and 4.5 ms more at 40 us."""
    assert step_rows(MODEL, 0.010) == 212


def test_rows_that_are_free_are_taken_whatever_is_owed():
    """Where even one row takes longer than a token may, a smaller step would save nothing: 4.2 ms
    are 105 rows."""
    assert step_rows(MODEL, 0.001) == 105


def test_one_sequence_has_room_for_its_drafts_and_masks():
    """21 rows are seven eighths of 24; where each row costs, the time owed would allow 8."""
    by_row = replace(MODEL, seconds_at=((1, 0.001), (1000, 1.0)))
    assert least_rows(by_row) == 24
    assert step_rows(by_row, 0.010) == 24


@given(st.floats(1e-4, 10), st.floats(1, 4))
def test_more_time_never_means_fewer_rows(owed_s, factor):
    """And a full step keeps the time owed, unless its rows are free."""
    rows = step_rows(MODEL, owed_s)
    assert rows <= step_rows(MODEL, factor * owed_s)
    assert MODEL.step_s(rows) <= max(owed_s, 1.05 * MODEL.step_s(1))


@pytest.mark.parametrize(
    ("rows", "said"), [(512, "512 rows takes 20.5 ms"), (16, "no room"), (212, None), (240, None)]
)
def test_a_number_that_contradicts_its_objective_is_told(rows, said):
    """240 rows take 9.6 ms, more than would be chosen, but no longer than a token may."""
    message = contradiction(MODEL, rows, 0.010)
    assert message is None if said is None else said in str(message) and "212 rows" in str(message)
