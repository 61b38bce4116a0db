"""Which outcomes get masks, worked by hand."""

import pytest

from mars_ray.core.tree import chain, likeliest_outcomes


@pytest.mark.parametrize(
    ("probabilities", "count", "expected"),
    [
        ([], 3, [0]),
        # Likelihoods of 0, 1, 2 accepted: 0.1, 0.45, 0.45; the tie goes to more.
        ([0.9, 0.5], 1, [2]),
        ([0.9, 0.5], 2, [2, 1]),
        ([0.9, 0.5], 9, [2, 1, 0]),
        # 0.8, 0.02, 0.18.
        ([0.2, 0.9], 2, [0, 2]),
    ],
)
def test_by_hand(probabilities, count, expected):
    """The draft after a doubtful one is rarely reached, however sure it is itself."""
    assert likeliest_outcomes(probabilities, count, chain(len(probabilities))) == expected
