"""Loads the trace that a source describes."""

import numpy as np

from mars_ray.simulator.config import (
    AzureTrace,
    FileTrace,
    FlashTrace,
    MooncakeTrace,
    RampTrace,
    ServeGenTrace,
    SineTrace,
    TraceSource,
)
from mars_ray.simulator.traces.generate import flash, ramp, sine
from mars_ray.simulator.traces.read import read_azure, read_mooncake, read_trace
from mars_ray.simulator.traces.servegen import servegen
from mars_ray.simulator.traces.trace import Trace


def load_trace(source: TraceSource, seed: int) -> Trace:
    """The source's trace; the same seed gives the same one. Raises DataError."""
    rng = np.random.default_rng([seed, 1])
    if isinstance(source, ServeGenTrace):
        # `servegen` has applied slice and rate itself, since it has no requests before them.
        return servegen(source, rng).scaled(1.0, source.spread_s, rng)
    whole = _whole(source, rng).part(source.start_s, source.duration_s)
    return whole.scaled(source.rate_factor, source.spread_s, rng)


def _whole(source: TraceSource, rng: np.random.Generator) -> Trace:
    match source:
        case FileTrace():
            return read_trace(source.path)
        case AzureTrace():
            return read_azure(source.path)
        case MooncakeTrace():
            return read_mooncake(source.path)
        case RampTrace():
            return ramp(source, rng)
        case FlashTrace():
            return flash(source, rng)
        case SineTrace():
            return sine(source, rng)
        case ServeGenTrace():
            raise AssertionError("sampled by window, not as a whole")
