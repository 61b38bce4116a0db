"""Intervals and tests, against published values and hand counts."""

import pytest

from mars_ray.core.statistics import paired_difference, ratio_fault, wilson_interval


def test_wilson_by_hand():
    """8 of 10: (0.4901, 0.9433), as in any table; and the ends do not leave [0, 1]."""
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(0, 10)[0] == 0
    assert wilson_interval(10, 10)[1] == pytest.approx(1)


def test_mcnemar_by_hand():
    """One-sided tail of 1 in 8 changes: (1 + 8) / 256; doubled."""

    def p_value(gained: int, lost: int) -> float:
        first = [False] * gained + [True] * lost + [True]
        return paired_difference(first, [True] * gained + [False] * lost + [True])[-1]

    assert p_value(1, 7) == pytest.approx(2 * 9 / 256)
    assert p_value(3, 3) == 1.0
    assert p_value(0, 0) == 1.0


def test_paired_difference_counts_changes_not_totals():
    """Guards an unpaired comparison: equal systems have no difference and a narrow interval."""
    first = [True] * 90 + [False] * 10
    difference, low, high, p_value = paired_difference(first, list(first))
    assert (difference, p_value) == (0, 1)
    assert high - low < 0.06
    worse = [False] * 10 + [True] * 80 + [False] * 10
    difference, _, high, p_value = paired_difference(first, worse)
    assert difference == pytest.approx(-0.1)
    assert high < 0
    assert p_value == pytest.approx(2 / 2**10)


def test_rounds_that_tell_no_ratio():
    """One; and those by which a forward brings more than its tokens, which only another program on
    the machine can do. As many as they show, which is two digits, are still told."""
    assert ratio_fault([1.2, 0.9, 1.31], 1.2) is None
    assert ratio_fault([1.204, 1.204], 1.2) is None
    assert ratio_fault([1.0], 1.5) == "one round tells no ratio"
    fault = ratio_fault([1.4, 1.3, 1.2], 1.2) or ""
    assert fault.startswith("the rounds say 1.30 times exact, and by their forwards at most 1.20")
