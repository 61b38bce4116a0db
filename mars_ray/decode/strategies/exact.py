"""`exact`: plain autoregressive decoding."""

from mars_ray.decode.draws import draw_tokens
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import Plan, Rows, positions


class Exact:
    """One token per forward."""

    def plan(self, sequence: Sequence) -> Plan:
        return Plan([], 0)

    def absorb(self, sequence: Sequence, plan: Plan, rows: Rows) -> list[int]:
        sequence.cached = sequence.committed
        sampling = sequence.request.sampling
        if sampling.temperature == 0:
            return rows.best[:1]
        return draw_tokens(rows.slice(0, 1), sampling, positions(sequence, 1))
