"""Judging answers, without torch: shares of correct ones, ratios of speeds, and endless loops.

Small models' greedy answers may repeat themselves for ever. Loops are easy to draft, so tokens per
forward are reported with and without them.
"""

from collections.abc import Sequence
from math import comb, sqrt
from statistics import median

_Z = 1.959963984540054  # of 95%


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95% confidence interval of a share (Wilson, 1927); it stays in [0, 1]."""
    share, square = successes / trials, _Z * _Z / trials
    centre = share + square / 2
    half = _Z * sqrt(share * (1 - share) / trials + square / (4 * trials))
    low, high = (centre - half) / (1 + square), (centre + half) / (1 + square)
    # At shares of 0 and 1, rounding could put the share itself outside the interval.
    return max(0.0, min(low, share)), min(1.0, max(high, share))


def paired_difference(first: list[bool], second: list[bool]) -> tuple[float, float, float, float]:
    """Difference of two shares over the same trials, second minus first; the ends of its 95%
    interval for paired proportions (Agresti and Min, 2005: half a trial added to each cell); and
    the two-sided p value of McNemar's exact test."""
    gained = sum(b and not a for a, b in zip(first, second, strict=True))
    lost = sum(a and not b for a, b in zip(first, second, strict=True))
    trials = len(first)
    n, b, c = trials + 2, gained + 0.5, lost + 0.5
    centre, half = (b - c) / n, _Z * sqrt(b + c - (b - c) ** 2 / n) / n
    changes = gained + lost
    tail = sum(comb(changes, k) for k in range(min(gained, lost) + 1)) / 2**changes
    return (gained - lost) / trials, centre - half, centre + half, min(1.0, 2 * tail)


def ratio_fault(ratios: Sequence[float], most: float) -> str | None:
    """Why these rounds tell no ratio of speeds, if forwards allow at most this one."""
    ratio = median(ratios)
    if len(ratios) == 1:
        return "one round tells no ratio"
    if round(ratio, 2) > round(most, 2):
        return (
            f"the rounds say {ratio:.2f} times exact, and by their forwards at most {most:.2f} is "
            "possible: other work disturbed them; measure again when the machine is idle"
        )
    return None


# An answer loops if this many of its last tokens repeat with at most this period.
_TAIL_TOKENS, _LONGEST_PERIOD = 32, 16


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether the last tokens are a loop; an answer that ended by itself is not one."""
    return _period(tokens) is not None


def before_loop(tokens: Sequence[int]) -> list[int]:
    """The tokens up to the end of the loop's second round; all tokens if there is no loop."""
    period = _period(tokens)
    if period is None:
        return list(tokens)
    start = len(tokens) - _TAIL_TOKENS
    while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
        start -= 1
    return list(tokens[: start + 2 * period])


def _period(tokens: Sequence[int]) -> int | None:
    """Shortest period with which the last tokens repeat; None if they do not."""
    tail = list(tokens[-_TAIL_TOKENS:])
    if len(tail) < _TAIL_TOKENS:
        return None
    periods = range(1, _LONGEST_PERIOD + 1)
    return next((period for period in periods if tail[period:] == tail[:-period]), None)
