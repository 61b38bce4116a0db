"""`verified`: drafts of one forward are checked by the causal rows of the next.

row        [ last committed | draft 1 | draft 2 | mask | mask | ... ]
predicts     draft 1?         draft 2?  the token after the drafts, then new drafts

The step's outcome is how many drafts are accepted. Masks behind all drafts mean something only if
all are; a group of masks for another outcome stands behind fewer drafts and sees no others.
"""

from mars_ray.config.decode import SpeculativeMode, VerifiedMode
from mars_ray.core.outcomes import likeliest_outcomes
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import MaskGroup, Plan, Rows, Strategy


class Verified(Strategy):
    """An outcome without masks costs one step without drafts.

    Greedy or sampled alike, a row has one token (`core.sampling`): at threshold 1 a draft is
    accepted if it is that token, so the output is that of `exact` whatever the drafts were.
    """

    def plan(self, sequence: Sequence) -> Plan:
        if sequence.groups > 1:
            return _plan_for_outcomes(sequence)
        # Drafts up to the limit, even the one that this forward could commit without: so a shorter
        # limit gives the beginning of what a longer one gives, also with relaxed acceptance.
        drafts = sequence.drafts[: sequence.remaining]
        masks = min(sequence.window, max(0, sequence.remaining - len(drafts) - 1))
        groups = (MaskGroup(len(drafts), masks),) if masks else ()
        return Plan(drafts, groups, ("ratio",))

    def absorb(self, sequence: Sequence, plan: Plan, rows: Rows) -> list[int]:
        threshold, drafts = _mode(sequence).threshold, plan.drafts
        if threshold == 1:
            accepts = [best == draft for best, draft in zip(rows.best, drafts, strict=False)]
        else:
            accepts = [ratio >= threshold for ratio in rows.numbers["ratio"][: len(drafts)]]
        accepted = [*accepts, False].index(False)
        sequence.cached = sequence.committed + accepted
        sequence.drafts, sequence.draft_probabilities = _next_drafts(plan, rows, accepted)
        return [*drafts[:accepted], rows.best[accepted]]


def _plan_for_outcomes(sequence: Sequence) -> Plan:
    """Nothing is cut at the limit here: it would change which outcomes are the likeliest."""
    outcomes = likeliest_outcomes(sequence.draft_probabilities, sequence.groups)
    groups = tuple(MaskGroup(after, sequence.window) for after in outcomes if sequence.window)
    return Plan(sequence.drafts, groups, ("ratio", "probability"))


def _next_drafts(plan: Plan, rows: Rows, accepted: int) -> tuple[list[int], list[float]]:
    """What the masks for this outcome say, if it has any."""
    start = len(plan.drafts) + 1
    for group in plan.groups:
        own = slice(start, start + group.masks)
        if group.after == accepted:
            probabilities = rows.numbers.get("probability", [0.0] * len(rows.best))
            return rows.best[own], probabilities[own]
        start = own.stop
    return [], []


def _mode(sequence: Sequence) -> VerifiedMode | SpeculativeMode:
    assert isinstance(sequence.request.mode, VerifiedMode | SpeculativeMode)
    return sequence.request.mode
