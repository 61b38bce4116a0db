"""Loads the trace that a source describes, or generates it: Poisson arrivals whose rate is a
function of time."""

import math
from collections.abc import Callable

import numpy as np

from mars_ray.simulator.config import (
    AzureTrace,
    FileTrace,
    FlashTrace,
    Lengths,
    MooncakeTrace,
    RampTrace,
    ServeGenTrace,
    SineTrace,
    TraceSource,
)
from mars_ray.simulator.traces.read import read_azure, read_mooncake, read_trace
from mars_ray.simulator.traces.servegen import servegen
from mars_ray.simulator.traces.trace import Floats, Ints, Trace, resampled


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


def ramp(source: RampTrace, rng: np.random.Generator) -> Trace:
    stages = np.array(source.rates_rps)

    def rate(times: Floats) -> Floats:
        return stages[np.minimum(times / source.stage_s, len(stages) - 1).astype(int)]

    return _trace(source, rate, stages.max(), len(stages) * source.stage_s, rng)


def flash(source: FlashTrace, rng: np.random.Generator) -> Trace:
    """A trace with a crowd that comes suddenly and leaves suddenly."""

    def rate(times: Floats) -> Floats:
        inside = (times >= source.from_s) & (times < source.to_s)
        return np.where(inside, source.peak_rps, source.base_rps)

    most = max(source.base_rps, source.peak_rps)
    return _trace(source, rate, most, source.duration_s, rng)


def sine(source: SineTrace, rng: np.random.Generator) -> Trace:
    """A trace whose rate is a wave, beginning at its lowest rate."""
    middle = (source.low_rps + source.high_rps) / 2
    swing = (source.high_rps - source.low_rps) / 2

    def rate(times: Floats) -> Floats:
        return middle - swing * np.cos(2 * math.pi * times / source.period_s)

    return _trace(source, rate, middle + abs(swing), source.duration_s, rng)


def _trace(
    source: RampTrace | FlashTrace | SineTrace,
    rate: Callable[[Floats], Floats],
    most_rps: float,
    duration_s: float,
    rng: np.random.Generator,
) -> Trace:
    """A trace by thinning arrivals at the highest rate (Lewis and Shedler, 1979)."""
    lengths = source.lengths
    count = rng.poisson(most_rps * source.rate_factor * duration_s)
    times = np.sort(rng.random(count)) * duration_s
    times = times[rng.random(count) * most_rps < rate(times)]
    prompts = token_counts(lengths.prompt_mean, lengths, len(times), rng)
    outputs = token_counts(lengths.output_mean, lengths, len(times), rng)
    return Trace(source.type, times, prompts, outputs)


def token_counts(mean: float, lengths: Lengths, count: int, rng: np.random.Generator) -> Ints:
    """Token counts, log-normal with this mean before they are cut."""
    variance = math.log1p(lengths.cv**2)
    values = rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
    return np.clip(np.round(values), 1, lengths.limit).astype(np.int64)
