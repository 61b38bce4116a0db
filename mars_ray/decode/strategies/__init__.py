"""The strategies by mode."""

from mars_ray.config.modes import (
    BlockCachedMode,
    ConfidenceMode,
    ExactMode,
    JacobiMode,
    Mode,
    VerifiedMode,
)
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import Strategy
from mars_ray.decode.strategies.block_cached import BlockCached
from mars_ray.decode.strategies.confidence import Confidence
from mars_ray.decode.strategies.exact import Exact
from mars_ray.decode.strategies.jacobi import Jacobi
from mars_ray.decode.strategies.verified import Verified

STRATEGIES: dict[type[Mode], Strategy] = {
    ExactMode: Exact(),
    ConfidenceMode: Confidence(),
    VerifiedMode: Verified(),
    BlockCachedMode: BlockCached(),
    JacobiMode: Jacobi(),
}


def strategy_of(sequence: Sequence) -> Strategy:
    """The strategy that decodes this sequence."""
    return STRATEGIES[type(sequence.request.mode)]
