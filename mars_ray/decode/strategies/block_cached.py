"""`block_cached`: the paper's rule, with the paper's way of caching.

No step reaches over the end of a cache block, and the cache grows by whole blocks. So the tokens of
an unfinished block are forwarded again in every step.
"""

from mars_ray.config.modes import BlockCachedMode
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import Plan, Proposals, Rows
from mars_ray.decode.strategies.confidence import Confidence


class BlockCached(Confidence):
    """Decodes as in the paper, but never waits for rows of other sequences."""

    def plan(self, sequence: Sequence) -> Plan:
        left_in_block = _block_end(sequence) - sequence.committed
        return self._plan(sequence, min(sequence.window, left_in_block - 1))

    def absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, outcome: int, proposals: Proposals
    ) -> list[int]:
        # The part of the unfinished block that is already in the cache is forgotten.
        begin = _block_end(sequence) - _block_size(sequence)
        sequence.cached = max(sequence.cached, begin)
        return self._committed(sequence, rows, proposals)


def _block_size(sequence: Sequence) -> int:
    assert isinstance(sequence.request.mode, BlockCachedMode)
    return sequence.request.mode.cache_block


def _block_end(sequence: Sequence) -> int:
    """End of the answer's cache block that contains the next token."""
    size = _block_size(sequence)
    return sequence.committed + size - (sequence.committed - len(sequence.request.prompt)) % size
