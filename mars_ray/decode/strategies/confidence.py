"""`confidence`, the paper's rule: commit proposals at once while their confidence passes.

Masks stand behind the last token, whatever was committed before, and leave nothing in the cache.
The confidence is that of the raw softmax; temperature only changes which token is taken.

At threshold 1 a step is one of plain decoding. Where the service sets the threshold, it may change
between two steps, to 1 and back.
"""

from itertools import takewhile

from mars_ray.config.modes import BlockCachedMode, ConfidenceMode
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import MaskGroup, Plan, Proposals, Rows, Strategy


class Confidence(Strategy):
    """Up to window + 1 tokens per forward; at threshold 1 one, without masks."""

    def plan(self, sequence: Sequence) -> Plan:
        return self._plan(sequence, sequence.window)

    def absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, outcome: int, proposals: Proposals
    ) -> list[int]:
        sequence.cached = sequence.committed
        return self._committed(sequence, rows, proposals)

    def _plan(self, sequence: Sequence, masks: int) -> Plan:
        masks = min(masks, sequence.remaining - 1)
        # The first token of a commit is the causal row's own and needs no review.
        review = min(sequence.last_commit, len(sequence.pending)) - 1
        groups = (MaskGroup(0, masks),) if masks else ()
        measure = _mode(sequence).measure
        # A step of plain decoding costs what one of `exact` does, so it measures nothing.
        wanted = () if sequence.is_plain else (measure,)
        return Plan([], groups, wanted, measure, max(0, review))

    def _committed(self, sequence: Sequence, rows: Rows, proposals: Proposals) -> list[int]:
        """The row's own token, and the proposals before the first that does not pass."""
        passed = takewhile(lambda number: _passes(number, sequence), proposals.confidences)
        return [rows.best[0], *proposals.tokens[: sum(1 for _ in passed)]]


def _mode(sequence: Sequence) -> ConfidenceMode | BlockCachedMode:
    assert isinstance(sequence.request.mode, ConfidenceMode | BlockCachedMode)
    return sequence.request.mode


def _passes(number: float, sequence: Sequence) -> bool:
    threshold = sequence.threshold
    return number <= threshold if _mode(sequence).measure == "entropy" else number >= threshold
