"""`verified`: drafts of one forward are checked by the causal rows of the next.

row        [ last committed | draft 1 | draft 2 | mask | mask | ... ]
predicts     draft 1?         draft 2?  the token after the drafts, then new drafts
"""

import torch

from mars_ray.config.decode import VerifiedMode
from mars_ray.core.accept import accepted_prefix
from mars_ray.core.sampling import probabilities
from mars_ray.core.verify import residual, sampled_accepts
from mars_ray.decode.draws import acceptance_draws, draw_drafts, draw_from, draw_tokens
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import Plan, Rows, positions


class Verified:
    """One trailing group of masks: a rejection costs one step without drafts."""

    def plan(self, sequence: Sequence) -> Plan:
        # Drafts up to the limit, even the one that this forward could commit without: so a shorter
        # limit gives the beginning of what a longer one gives, also when sampling.
        drafts = sequence.drafts[: sequence.remaining]
        masks = min(sequence.window, max(0, sequence.remaining - len(drafts) - 1))
        return Plan(drafts, masks, "ratio" if _mode(sequence).threshold < 1 else None)

    def absorb(self, sequence: Sequence, plan: Plan, rows: Rows) -> list[int]:
        if sequence.request.sampling.temperature > 0:
            return _absorb_sampled(sequence, plan, rows)
        threshold, drafts = _mode(sequence).threshold, plan.drafts
        if threshold == 1:
            accepts = [best == draft for best, draft in zip(rows.best, drafts, strict=False)]
        else:
            assert rows.numbers is not None
            accepts = [number >= threshold for number in rows.numbers[: len(drafts)]]
        accepted = [*accepts, False].index(False)
        sequence.cached = sequence.committed + accepted
        whole = accepted == len(drafts)
        sequence.drafts = rows.best[len(drafts) + 1 :] if whole else []
        return [*drafts[:accepted], rows.best[accepted]]


def _absorb_sampled(sequence: Sequence, plan: Plan, rows: Rows) -> list[int]:
    """Speculative sampling; see `core.verify`."""
    sampling, count = sequence.request.sampling, len(plan.drafts)
    accepted, p_KV = 0, probabilities(rows.slice(0, count), sampling)
    if count:
        assert sequence.draft_q_KV is not None
        accepts = sampled_accepts(
            p_KV,
            sequence.draft_q_KV[:count],
            torch.tensor(plan.drafts, device=p_KV.device),
            _mode(sequence).threshold,
            acceptance_draws(sampling, positions(sequence, count)),
        )
        accepted = accepted_prefix(accepts)
    here = positions(sequence, 1, accepted)
    if accepted < count:
        assert sequence.draft_q_KV is not None
        at = slice(accepted, accepted + 1)
        token = draw_from(residual(p_KV[at], sequence.draft_q_KV[at]), sampling, here)
    else:
        token = draw_tokens(rows.slice(count, count + 1), sampling, here)
    sequence.drafts, sequence.draft_q_KV = [], None
    if accepted == count and plan.masks:
        after = positions(sequence, plan.masks, count + 1)
        sequence.drafts, sequence.draft_q_KV = draw_drafts(rows.slice(count + 1), sampling, after)
    sequence.cached = sequence.committed + accepted
    return [*plan.drafts[:accepted], *token]


def _mode(sequence: Sequence) -> VerifiedMode:
    assert isinstance(sequence.request.mode, VerifiedMode)
    return sequence.request.mode
