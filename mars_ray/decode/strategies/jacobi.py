"""`jacobi`: guesses are replaced by their rows' predictions until both agree, left to right."""

from mars_ray.config.modes import JacobiMode
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import Plan, Proposals, Rows, Strategy


class Jacobi(Strategy):
    """The baseline of the paper's appendix C; it needs no MARS training and gains little."""

    def plan(self, sequence: Sequence) -> Plan:
        return Plan(sequence.drafts[: sequence.remaining])

    def outcome(self, sequence: Sequence, plan: Plan, rows: Rows) -> int:
        agree = [best == draft for best, draft in zip(rows.best, plan.drafts, strict=False)]
        return [*agree, False].index(False)

    def absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, outcome: int, proposals: Proposals
    ) -> list[int]:
        sequence.cached = sequence.committed + outcome
        mode = sequence.request.mode
        assert isinstance(mode, JacobiMode)
        # The next guesses are the later rows' predictions, and then repeats of the last token.
        guesses = rows.best[outcome + 1 :]
        filler = guesses[-1] if guesses else rows.best[outcome]
        sequence.drafts = guesses + [filler] * (mode.guesses - len(guesses))
        return [*plan.drafts[:outcome], rows.best[outcome]]
