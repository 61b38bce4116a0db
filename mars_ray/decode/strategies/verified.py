"""`verified`: drafts of one forward are checked by the causal rows of the next.

row        [ last committed | draft 1 | draft 2 | mask | mask | ... ]
predicts     draft 1?         draft 2?  the token after the drafts, then new drafts

The drafts may be a tree (`core.tree`): alternatives for the first draft, each with its successors.
The step's outcome is the node where it ends. Masks behind a whole chain of drafts are useful only
if all drafts are accepted. A group of masks for another outcome stands behind another node, and
sees only the drafts on the path to it.
"""

from collections.abc import Sequence as Several
from dataclasses import replace

from mars_ray.core.draft_choice import Choice, likeliest_outcomes
from mars_ray.core.thresholds import Budget
from mars_ray.core.tree import children_of, depths_of, first_chain, renumbered
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import MaskGroup, Plan, Proposals, Rows, Strategy


class Verified(Strategy):
    """Verifies drafts. After an outcome without masks, one step has no drafts.

    Whether greedy or sampled, a row has one token (`core.sampling`). At threshold 1 a draft is
    accepted only if it is that token, so the output is that of `exact` whatever the drafts were.
    """

    def plan(self, sequence: Sequence) -> Plan:
        if sequence.choice:
            return _chosen_plan(sequence, sequence.choice)
        if sequence.groups > 1:
            return _plan_for_outcomes(sequence)
        # Drafts up to the limit, even one for the last token, which needs no draft. So a shorter
        # limit gives a prefix of the text of a longer one, also with relaxed acceptance.
        depths = depths_of(sequence.draft_parents)
        nodes = [n for n in range(1, len(depths)) if depths[n] <= sequence.remaining]
        plan = _plan(sequence, nodes)
        end = first_chain(plan.parents)
        masks = min(sequence.window, max(0, sequence.remaining - end - 1))
        return replace(plan, groups=(MaskGroup(end, masks),)) if masks else plan

    def outcome(self, sequence: Sequence, plan: Plan, rows: Rows) -> int:
        """The last accepted draft. The path goes from each node to the draft that is its row's
        token, or below threshold 1 to the best that passes, while the request's budget allows."""
        budget = sequence.request.quality
        answer = sequence.committed - len(sequence.request.prompt)
        disagreed, ratios = sequence.disagreed, rows.numbers["ratio"]
        children, node, depth = children_of(plan.parents), 0, 0
        while followers := children[node]:
            equal = (child for child in followers if plan.drafts[child - 1] == rows.best[node])
            child = next(equal, None)
            if child is None:
                child = max(followers, key=lambda follower: ratios[follower - 1])
                if sequence.threshold == 1 or ratios[child - 1] < sequence.threshold:
                    break
                if isinstance(budget, Budget) and not budget.allows(disagreed, answer + depth + 1):
                    break
                disagreed += 1
            node, depth = child, depth + 1
        return node

    def absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, outcome: int, proposals: Proposals
    ) -> list[int]:
        accepted = plan.tokens(outcome)
        sequence.cached = sequence.committed + len(accepted)
        sequence.set_drafts(proposals.tokens, proposals.confidences, proposals.parents)
        return [*accepted, rows.best[outcome]]


def _plan(sequence: Sequence, nodes: Several[int], groups: tuple[MaskGroup, ...] = ()) -> Plan:
    """A plan with these of the sequence's drafts."""
    return Plan(
        [sequence.drafts[node - 1] for node in nodes],
        groups,
        ("ratio",),
        parents=renumbered(sequence.draft_parents, nodes),
        confidences=[sequence.draft_probabilities[node - 1] for node in nodes],
        matches=[sequence.draft_matches[node - 1] for node in nodes],
    )


def _chosen_plan(sequence: Sequence, choice: Choice) -> Plan:
    """The plan that window control chose, without drafts that are gone since an earlier choice."""
    masks = {0: choice.masks[0]}
    for node, count in zip(choice.nodes, choice.masks[1:], strict=True):
        if node <= len(sequence.drafts) and sequence.draft_parents[node - 1] in masks:
            masks[node] = count
    groups = tuple(MaskGroup(after, count) for after, count in enumerate(masks.values()) if count)
    return _plan(sequence, [node for node in masks if node], groups)


def _plan_for_outcomes(sequence: Sequence) -> Plan:
    """A plan with masks behind the likeliest outcomes. Nothing is cut at the limit, since that
    would change which outcomes these are."""
    parents = sequence.draft_parents
    outcomes = likeliest_outcomes(sequence.draft_probabilities, sequence.groups, parents)
    groups = tuple(MaskGroup(after, sequence.window) for after in outcomes if sequence.window)
    return _plan(sequence, range(1, len(parents) + 1), groups)
