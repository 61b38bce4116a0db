"""What is told of a live trade, by hand."""

import pytest
from trade import _between, _recovered


def test_points_between_two_thresholds():
    """In proportion; below the lowest that was measured, as much as there."""
    lost = {1.0: 0.0, 0.8: 2.0, 0.4: 10.0}
    assert _between(lost, 1.0) == 0
    assert _between(lost, 0.9) == pytest.approx(1)
    assert _between(lost, 0.6) == pytest.approx(6)
    assert _between(lost, 0.1) == 10


def test_quality_recovers_after_the_second_replica():
    """Guards seconds that count from the order, or end at a threshold from before."""
    timeline = {
        "at_s": [0.0, 10.0, 20.0, 30.0, 40.0],
        "ready": [1, 1, 2, 2, 2],
        "threshold": [1.0, 0.6, 0.6, 0.8, 1.0],
    }
    assert _recovered(timeline) == 20
    assert _recovered(timeline | {"threshold": [1.0, 0.6, 0.6, 0.6, 0.6]}) is None
    assert _recovered(timeline | {"ready": [1] * 5}) is None
