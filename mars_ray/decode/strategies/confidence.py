"""`confidence`: the paper's rule, commit at once while the confidence passes."""

from itertools import takewhile

from mars_ray.config.decode import ConfidenceMode
from mars_ray.decode.draws import draw_tokens
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import Plan, Rows, positions


class Confidence:
    """Up to window + 1 tokens per forward. Masks leave nothing behind in the cache."""

    def plan(self, sequence: Sequence) -> Plan:
        return Plan([], min(sequence.window, sequence.remaining - 1), _mode(sequence).measure)

    def absorb(self, sequence: Sequence, plan: Plan, rows: Rows) -> list[int]:
        mode, sampling = _mode(sequence), sequence.request.sampling
        sequence.cached = sequence.committed
        assert rows.numbers is not None
        passed = takewhile(lambda number: _passes(number, mode), rows.numbers[1:])
        count = 1 + sum(1 for _ in passed)
        if sampling.temperature == 0:
            return rows.best[:count]
        return draw_tokens(rows.slice(0, count), sampling, positions(sequence, count))


def _mode(sequence: Sequence) -> ConfidenceMode:
    assert isinstance(sequence.request.mode, ConfidenceMode)
    return sequence.request.mode


def _passes(number: float, mode: ConfidenceMode) -> bool:
    return number <= mode.threshold if mode.measure == "entropy" else number >= mode.threshold
