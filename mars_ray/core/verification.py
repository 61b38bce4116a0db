"""Verification of drafts by the causal rows of the next forward (design: `verified`).

Shape suffixes: K drafts, V vocabulary.
"""

from torch import Tensor


def accepts(scores_KV: Tensor, draft_K: Tensor, threshold: float) -> Tensor:
    """Whether each draft passes, bool (K,); scores are those of `core.sampling.scores`.

    At threshold 1 the draft must be the argmax itself, so that a tie cannot change the output.
    Below, its score may lie log(1 / threshold) under the largest: at temperature 0 that is
    p(d) >= threshold * max p; when sampling, the same of probabilities times their noise.
    """
    if threshold == 1:
        return scores_KV.argmax(dim=-1) == draft_K
    draft_score_K = scores_KV.gather(-1, draft_K.unsqueeze(-1)).squeeze(-1)
    return (draft_score_K - scores_KV.amax(dim=-1)).exp() >= threshold
