"""How tokens are drawn: every random number is a function of the request's seed and the position.

Shape suffixes: N rows, V vocabulary.
"""

import torch
from torch import Tensor

from mars_ray.config.decode import Sampling
from mars_ray.core.randomness import uniform
from mars_ray.core.sampling import choose, probabilities

# A number of their own for each purpose: an accepted draft says nothing about the next draw.
_TOKEN, _DRAFT, _ACCEPT = 11, 12, 13


def ban_token(logits_NV: Tensor, token: int) -> Tensor:
    """The logits without this token: the mask token is never emitted, in any mode."""
    logits_NV[..., token] = -torch.inf
    return logits_NV


def draw_tokens(logits_NV: Tensor, sampling: Sampling, positions: Tensor) -> list[int]:
    """Tokens for these positions, drawn from the rows' distributions."""
    return _draw(probabilities(logits_NV, sampling), sampling, _TOKEN, positions)


def draw_from(p_NV: Tensor, sampling: Sampling, positions: Tensor) -> list[int]:
    """Tokens for these positions, drawn from distributions given as such."""
    return _draw(p_NV, sampling, _TOKEN, positions)


def draw_drafts(
    logits_NV: Tensor, sampling: Sampling, positions: Tensor
) -> tuple[list[int], Tensor]:
    """Drafts for these positions and the distributions they were drawn from."""
    q_NV = probabilities(logits_NV, sampling)
    return _draw(q_NV, sampling, _DRAFT, positions), q_NV


def acceptance_draws(sampling: Sampling, positions: Tensor) -> Tensor:
    """The numbers that decide about drafts at these positions, float64."""
    return uniform(sampling.seed, _ACCEPT, positions)


def _draw(p_NV: Tensor, sampling: Sampling, purpose: int, positions: Tensor) -> list[int]:
    return choose(p_NV, uniform(sampling.seed, purpose, positions)).tolist()
