"""A trace drawn from what Prometheus knows, which is rates and histograms, not requests."""

import numpy as np

from mars_ray.advise.prometheus import Floats, Histogram, Measured
from mars_ray.errors import DataError
from mars_ray.simulator.traces.trace import Ints, Trace

ASSUMED = (
    "A request arrives in the minute in which its answer ended, at a random moment of it: bursts "
    "shorter than a minute are not in the counters.",
    "Requests that were refused, or never sent because the service was slow, are unknown: after "
    "an overload the load was larger than what is seen here.",
    "Mean lengths are those of the quarter of an hour around a minute. Their spread is that of the "
    "histogram of the whole time, evenly inside a bucket; where there is none it is log-normal "
    "with a standard deviation as large as the mean.",
    "Prompt and answer of a request are drawn independently, and every prompt is computed in full: "
    "which of them share a prefix is not in the counters.",
)
_MINUTE_S = 60.0
# Minutes over which mean lengths are taken: a counter of tokens runs ahead of that of answers.
_AROUND = 15


def draw(measured: Measured, seed: int) -> Trace:
    """A trace with the measured requests and tokens; the same seed gives the same one. Raises
    DataError if it has no request."""
    rng = np.random.default_rng([seed, 1])
    whole = np.floor(measured.requests)
    # A fraction of a request becomes a request with that probability.
    counts = (whole + (rng.random(len(whole)) < measured.requests - whole)).astype(np.int64)
    minute = np.repeat(np.arange(len(counts)), counts)
    if not len(minute):
        raise DataError(f"{measured.model}: less than one request was measured")
    arrival_s = np.sort((minute + rng.random(len(minute))) * _MINUTE_S)
    prompts = _means(measured.prompt_tokens, measured.requests)[minute]
    answers = _means(measured.generation_tokens, measured.requests)[minute]
    return Trace(
        measured.model,
        arrival_s,
        _lengths(prompts, measured.prompt_lengths, rng),
        _lengths(answers, measured.generation_lengths, rng),
    )


def _means(tokens: Floats, requests: Floats) -> Floats:
    """Tokens per request around each minute; where there are no requests, the mean of all."""
    near, sums = (
        np.convolve(values, np.ones(_AROUND))[_AROUND // 2 :][: len(values)]
        for values in (requests, tokens)
    )
    mean = tokens.sum() / requests.sum()
    return np.where(near >= 1, sums / np.maximum(near, 1), mean)


def _lengths(means: Floats, histogram: Histogram | None, rng: np.random.Generator) -> Ints:
    """Token counts with these means."""
    spread = _spread(histogram, len(means), rng) if histogram else _log_normal(len(means), rng)
    return np.maximum(1, np.round(means * spread)).astype(np.int64)


def _log_normal(count: int, rng: np.random.Generator) -> Floats:
    """Values with mean 1 and standard deviation 1."""
    variance = np.log(2)
    return rng.lognormal(-variance / 2, np.sqrt(variance), count)


def _spread(histogram: Histogram, count: int, rng: np.random.Generator) -> Floats:
    """Values of the histogram over its mean."""
    high = np.array(histogram.bounds)
    low = np.concatenate(([0.0], high[:-1]))
    # Nobody knows how far an open bucket goes.
    high = np.where(np.isinf(high), np.maximum(1.0, 2 * low), high)
    share = np.array(histogram.counts) / np.sum(histogram.counts)
    place = rng.choice(len(share), count, p=share)
    values = low[place] + (high - low)[place] * rng.random(count)
    return values / np.dot(share, (low + high) / 2)
