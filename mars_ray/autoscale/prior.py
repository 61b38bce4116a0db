"""A service model before anything is measured: what a checkpoint's own files say."""

from mars_ray.autoscale.measured import levels_of, verified_level
from mars_ray.autoscale.service_model import Level, ServiceModel
from mars_ray.core.frontier import Frontier
from mars_ray.errors import ConfigError

# Acceptance of a draft where nothing is known; live measures correct it.
_RATE = 0.7
# Of the first replica, until it has measured its own: half a step's fixed cost, the rest by row.
_STEPS = ((1, 0.02), (64, 0.04))


def prior_model(name: str, frontier: Frontier | None, depth: int, max_batch: int) -> ServiceModel:
    """`depth` masks were trained. Without a frontier with verified points only lossless decoding is
    offered: what a lower threshold would cost is not known."""
    lossless = verified_level(1.0, 0.0, [_RATE] * depth) if depth else Level(1.0, 0.0, ())
    levels: tuple[Level, ...] = (lossless,)
    if frontier and depth:
        try:
            levels = levels_of(frontier, "verified", depth)
        except ConfigError:
            levels = (lossless,)
    return ServiceModel(name, _STEPS, levels, max_batch)
