"""What a step costs, by how many rows it has: measured on the device at hand, never guessed."""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate, pairwise


class StepCost:
    """Seconds of a forward: measured at some numbers of rows, linear between them and beyond."""

    def __init__(self, seconds_at: Mapping[int, float]) -> None:
        """At least two numbers of rows. More rows never take less time: what says so is noise."""
        self._rows = sorted(seconds_at)
        self._seconds = list(accumulate((seconds_at[rows] for rows in self._rows), max))

    def seconds(self, rows: float) -> float:
        """Of a step of so many rows; a mean of several steps may have a fraction."""
        right = min(max(1, bisect_left(self._rows, rows)), len(self._rows) - 1)
        low, high = self._rows[right - 1], self._rows[right]
        from_s, to_s = self._seconds[right - 1], self._seconds[right]
        return max(self._seconds[0], from_s + (to_s - from_s) * (rows - low) / (high - low))

    def table(self) -> dict[int, float]:
        """What was measured, made monotone."""
        return dict(zip(self._rows, self._seconds, strict=True))


def row_counts(most: int) -> list[int]:
    """Where to measure: powers of two and the steps half way between, up to `most`."""
    powers = [1]
    while powers[-1] < most:
        powers.append(2 * powers[-1])
    between = [(low + high) // 2 for low, high in pairwise(powers) if high - low > 1]
    return sorted({min(rows, most) for rows in powers + between} | {2})
