"""Seconds that a step takes by its number of rows: measured on this device, never guessed.

Other work on the machine makes a measurement longer, never shorter. So a number of rows is taken to
cost no more than a larger number was seen to take: otherwise one disturbed step would make all rows
up to it look free. Later steps correct errors of the measurements at the start.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

# Least ratio between the last two numbers of rows that are measured.
_LEAST_STEP = 1.25
# How far one step moves the estimates; an outlier counts as at most twice the expected seconds.
_RATE = 0.05
# No number of rows ever costs less than this share of its first measurement. Without it, rows would
# cost nothing where a sequence was measured as dearer than whole steps.
_LEAST_SHARE = 0.1

# Cached tokens of each sequence for which tables of steps by rows are made.
CONTEXT = 128


class StepCost:
    """Seconds of a forward: measured at some numbers of rows, linear between them.

    Beyond the last, the cost rises with the slope of the last doubling. The slope between two
    neighbours would be mostly noise, and if it were zero, rows would look free at any size.

    A sequence also costs time by itself (a call of attention, say), so a row more in a sequence
    costs less than a sequence more. So does what rows attend to: every cached token of a sequence
    is read, and a prompt's row is multiplied with every token before it. And a step's first mask
    has the adapter's weights read, while each has a head and candidates of its own: rows alone do
    not tell plain steps from those with masks. These costs stay as measured at the start: steps
    under one load cannot tell them from the cost of rows, and giving them a share of every
    correction led them astray.
    """

    def __init__(
        self,
        seconds_at: Mapping[int, float],
        sequence_s: float = 0.0,
        cache_token_s: float = 0.0,
        prompt_attention_s: float = 0.0,
        first_mask_s: float = 0.0,
        mask_s: float = 0.0,
    ) -> None:
        """Needs at least two numbers of rows; their seconds exclude what sequences and their cached
        tokens cost by themselves, and pairs of a prompt's row and a token before it, and masks."""
        self.sequence_s = sequence_s
        self.cache_token_s = cache_token_s
        self.prompt_attention_s = prompt_attention_s
        self.first_mask_s, self.mask_s = first_mask_s, mask_s
        self._rows = sorted(seconds_at)
        self._measured = [seconds_at[rows] for rows in self._rows]
        self._least = [_LEAST_SHARE * seconds for seconds in self._measured]
        self._seconds = _monotone(self._measured)

    def seconds(
        self,
        rows: float,
        sequences: float = 0,
        context_tokens: float = 0,
        prompt_pairs: float = 0,
        masks: float = 0,
    ) -> float:
        """Seconds of a step; `rows`, masks included, may be the mean of several steps, with a
        fraction."""
        attention_s = self.cache_token_s * context_tokens + self.prompt_attention_s * prompt_pairs
        masks_s = self.first_mask_s * min(1, masks) + self.mask_s * masks
        return self._of_rows(rows) + self.sequence_s * sequences + attention_s + masks_s

    def _of_rows(self, rows: float) -> float:
        last = self._rows[-1]
        if rows > last:
            doubling_s = self._seconds[-1] - self._of_rows(last / 2)
            return self._seconds[-1] + doubling_s * (rows - last) / (last / 2)
        right, share = self._place(rows)
        from_s, to_s = self._seconds[right - 1], self._seconds[right]
        return max(self._seconds[0], from_s * (1 - share) + to_s * share)

    def observe(
        self,
        rows: int,
        seconds: float,
        sequences: int = 0,
        context_tokens: int = 0,
        prompt_pairs: int = 0,
        masks: int = 0,
    ) -> None:
        """Move the measurements on both sides of `rows` a little towards this step's seconds.

        They move in proportion, so no cost becomes zero. Steps beyond the measurements change
        nothing: the line there is extrapolated, and its error says nothing about the measurements.
        """
        if not self._rows[0] <= rows <= self._rows[-1]:
            return
        right, share = self._place(rows)
        wrong_s = seconds - self.seconds(rows, sequences, context_tokens, prompt_pairs, masks)
        moved = _RATE * max(-1.0, min(wrong_s / self._of_rows(rows), 1.0))
        for place, part in ((right - 1, 1 - share), (right, share)):
            moved_s = self._seconds[place] * (1 + moved * part)
            self._measured[place] = max(self._least[place], moved_s)
        self._seconds = _monotone(self._measured)

    def _place(self, rows: float) -> tuple[int, float]:
        """Index of the measured point to the right, and how far `rows` is on the way to it."""
        right = min(max(1, bisect_left(self._rows, rows)), len(self._rows) - 1)
        low, high = self._rows[right - 1], self._rows[right]
        return right, (rows - low) / (high - low)

    def table(self, most_sequences: int = 0, context_tokens: int = 0) -> dict[int, float]:
        """Seconds at each measured number of rows, of which the first are a sequence each, with so
        many tokens in the cache, and of the others two in three are masks."""
        found = {}
        for rows in self._rows:
            sequences = min(rows, most_sequences)
            masks = (rows - sequences) * 2 / 3
            found[rows] = self.seconds(rows, sequences, sequences * context_tokens, masks=masks)
        return found


def _monotone(seconds: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(seconds), min))[::-1]


def row_counts(most: int) -> list[int]:
    """Numbers of rows to measure: powers of two, the steps half way between, and `most`."""
    powers = [1]
    while powers[-1] < most:
        powers.append(2 * powers[-1])
    between = [(low + high) // 2 for low, high in pairwise(powers) if high - low > 1]
    spread = [rows for rows in powers + between if _LEAST_STEP * rows <= most]
    return sorted({*spread, most, 1, 2})
