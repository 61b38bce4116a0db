"""`verified`: drafts of one forward are checked by the causal rows of the next.

row        [ last committed | draft 1 | draft 2 | mask | mask | ... ]
predicts     draft 1?         draft 2?  the token after the drafts, then new drafts

The step's outcome is how many drafts are accepted. Masks behind all drafts mean something only if
all are; a group of masks for another outcome stands behind fewer drafts and sees no others.
"""

from mars_ray.core.drafting import Choice
from mars_ray.core.outcomes import likeliest_outcomes
from mars_ray.decode.quality import Budget
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import MaskGroup, Plan, Proposals, Rows, Strategy


class Verified(Strategy):
    """An outcome without masks costs one step without drafts.

    Greedy or sampled alike, a row has one token (`core.sampling`): at threshold 1 a draft is
    accepted if it is that token, so the output is that of `exact` whatever the drafts were.
    """

    def plan(self, sequence: Sequence) -> Plan:
        if sequence.choice:
            return _chosen_plan(sequence, sequence.choice)
        if sequence.groups > 1:
            return _plan_for_outcomes(sequence)
        # Drafts up to the limit, even the one that this forward could commit without: so a shorter
        # limit gives the beginning of what a longer one gives, also with relaxed acceptance.
        drafts = sequence.drafts[: sequence.remaining]
        masks = min(sequence.window, max(0, sequence.remaining - len(drafts) - 1))
        groups = (MaskGroup(len(drafts), masks),) if masks else ()
        return Plan(drafts, groups, ("ratio",))

    def outcome(self, sequence: Sequence, plan: Plan, rows: Rows) -> int:
        """Drafts are accepted which are the row's token, and below threshold 1 those which are
        nearly as good, while the request's budget allows it."""
        budget = sequence.request.quality
        answer = sequence.committed - len(sequence.request.prompt)
        disagreed = sequence.disagreed
        for index, draft in enumerate(plan.drafts):
            if rows.best[index] == draft:
                continue
            if sequence.threshold == 1 or rows.numbers["ratio"][index] < sequence.threshold:
                return index
            if isinstance(budget, Budget) and not budget.allows(disagreed, answer + index + 1):
                return index
            disagreed += 1
        return len(plan.drafts)

    def absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, accepted: int, proposals: Proposals
    ) -> list[int]:
        sequence.cached = sequence.committed + accepted
        sequence.drafts = proposals.tokens
        sequence.draft_probabilities = proposals.confidences
        return [*plan.drafts[:accepted], rows.best[accepted]]


def _chosen_plan(sequence: Sequence, choice: Choice) -> Plan:
    drafts = sequence.drafts[: choice.drafts]
    masks = choice.masks[: len(drafts) + 1]
    groups = tuple(MaskGroup(after, count) for after, count in enumerate(masks) if count)
    return Plan(drafts, groups, ("ratio",))


def _plan_for_outcomes(sequence: Sequence) -> Plan:
    """Nothing is cut at the limit here: it would change which outcomes are the likeliest."""
    outcomes = likeliest_outcomes(sequence.draft_probabilities, sequence.groups)
    groups = tuple(MaskGroup(after, sequence.window) for after in outcomes if sequence.window)
    return Plan(sequence.drafts, groups, ("ratio",))
