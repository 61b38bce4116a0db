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
from mars_ray.simulator.traces.resample import resampled
from mars_ray.simulator.traces.servegen import servegen
from mars_ray.simulator.traces.trace import Trace


def load_trace(source: TraceSource, seed: int) -> Trace:
    """The source's trace; the same seed gives the same one. Raises DataError.

    Seed 0 is a recorded trace as it was recorded, other seeds draw from it; what is generated is
    generated anew by every seed.
    """
    rng = np.random.default_rng([seed, 1])
    match source:
        case ServeGenTrace():
            trace = servegen(source, source.resample and seed > 0, rng)
        case FileTrace() | AzureTrace() | MooncakeTrace():
            trace = resampled(
                _read(source).part(source.start_s, source.duration_s),
                source.rate_factor,
                source.resample and seed > 0,
                rng,
            )
        case RampTrace() | FlashTrace() | SineTrace():
            trace = _generated(source, rng).part(source.start_s, source.duration_s)
    return trace.spread(source.spread_s, rng)


def _read(source: FileTrace | AzureTrace | MooncakeTrace) -> Trace:
    match source:
        case FileTrace():
            return read_trace(source.path)
        case AzureTrace():
            return read_azure(source.path)
        case MooncakeTrace():
            return read_mooncake(source.path)


def _generated(source: RampTrace | FlashTrace | SineTrace, rng: np.random.Generator) -> Trace:
    match source:
        case RampTrace():
            return ramp(source, rng)
        case FlashTrace():
            return flash(source, rng)
        case SineTrace():
            return sine(source, rng)
