"""`exact`: plain autoregressive decoding."""

from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import Plan, Proposals, Rows, Strategy


class Exact(Strategy):
    """One token per forward."""

    def plan(self, sequence: Sequence) -> Plan:
        return Plan([])

    def absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, outcome: int, proposals: Proposals
    ) -> list[int]:
        sequence.cached = sequence.committed
        return rows.best[:1]
