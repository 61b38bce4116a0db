"""The paper's rule: commit at once while the confidence passes.

`confidence` slides: masks stand behind the last token, whatever was committed before.
`block_cached` is the paper's own way: no step reaches over the end of a cache block, and the cache
is extended by whole blocks, so the tokens of an unfinished block are forwarded again in every step.
"""

from itertools import takewhile

from mars_ray.config.modes import BlockCachedMode, ConfidenceMode
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import MaskGroup, Plan, Proposals, Rows, Strategy


class Confidence(Strategy):
    """Up to window + 1 tokens per forward. Masks leave nothing behind in the cache.

    The confidence is that of the raw softmax; temperature changes only which token is taken.
    """

    def plan(self, sequence: Sequence) -> Plan:
        return _plan(sequence, sequence.window)

    def absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, outcome: int, proposals: Proposals
    ) -> list[int]:
        sequence.cached = sequence.committed
        return _committed(sequence, rows, proposals)


class BlockCached(Strategy):
    """As the paper, but without its waiting: rows of other sequences are never waited for."""

    def plan(self, sequence: Sequence) -> Plan:
        left_in_block = _block_end(sequence, sequence.committed) - sequence.committed
        return _plan(sequence, min(sequence.window, left_in_block - 1))

    def absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, outcome: int, proposals: Proposals
    ) -> list[int]:
        # What of the unfinished block is in the cache already is forgotten.
        size = _block_size(sequence)
        sequence.cached = max(sequence.cached, _block_end(sequence, sequence.committed) - size)
        return _committed(sequence, rows, proposals)


def _plan(sequence: Sequence, masks: int) -> Plan:
    masks = min(masks, sequence.remaining - 1)
    # The first token of a commit is the causal row's own.
    review = min(sequence.last_commit, len(sequence.pending)) - 1
    groups = (MaskGroup(0, masks),) if masks else ()
    measure = _mode(sequence).measure
    return Plan([], groups, (measure,), measure, max(0, review))


def _committed(sequence: Sequence, rows: Rows, proposals: Proposals) -> list[int]:
    mode = _mode(sequence)
    passed = takewhile(lambda number: _passes(number, mode), proposals.confidences)
    return [rows.best[0], *proposals.tokens[: sum(1 for _ in passed)]]


def _mode(sequence: Sequence) -> ConfidenceMode | BlockCachedMode:
    assert isinstance(sequence.request.mode, ConfidenceMode | BlockCachedMode)
    return sequence.request.mode


def _passes(number: float, mode: ConfidenceMode | BlockCachedMode) -> bool:
    return number <= mode.threshold if mode.measure == "entropy" else number >= mode.threshold


def _block_size(sequence: Sequence) -> int:
    mode = _mode(sequence)
    assert isinstance(mode, BlockCachedMode)
    return mode.cache_block


def _block_end(sequence: Sequence, place: int) -> int:
    """End of the answer's cache block that `place` lies in."""
    prompt, size = len(sequence.request.prompt), _block_size(sequence)
    return place + size - (place - prompt) % size
