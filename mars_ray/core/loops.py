"""Detection of answers that repeat themselves for ever, as small models' greedy answers do.

They are easy to draft, so tokens per forward are reported with and without them. No torch here.
"""

from collections.abc import Sequence

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
