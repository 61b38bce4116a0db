"""How much load there will be when a replica ordered now is ready, and how sure that is.

Requests are counted in buckets of an eighth of the cold start H. From their rates x:

    level  mean of the last four buckets
    slope  of the last 2 H, the smaller of its two halves' if both rise, else 0: a ramp has it in
           both halves, a step and a spike only in one
    sigma  of the rises x(t + H) - x(t) beyond their mean, as if falls were as likely; the newer
           ones count more, and it is never more than the level
    burst  index of dispersion of the counts, from neighbours (1 for Poisson arrivals)

    mu = level + slope (H + lag of the level)

If mu and sigma do not explain the rate of the last seconds, that rate is a surge. For one cold
start, until the forecast includes it, it counts as load (as in the panic window of Knative's
autoscaler). It does not count in full: only the share that earlier surges had kept by the time
their replicas were ready. So a lasting crowd gets replicas at once. Bursts that end before a
replica can help order none; the threshold absorbs them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, median

from mars_ray.config.scaling import ScalingConfig

BUCKETS_OF_COLD_START = 8
_KEPT = 64
_LEVEL = 4  # buckets
# A burst index above this is not believed.
_MOST_BURST = 25.0
# Cold starts after which a surprise counts for a third.
_FORGET = 3
# Before anything is known of a load, its rises within a cold start are assumed to be this share.
_UNKNOWN = 0.25
# A surge exceeds the counting noise by this many standard deviations; 3: one false alarm in 700.
_SURPRISE = 3.0
# Surges that the kept share remembers; it begins as if one surge had kept all of its rise.
_REMEMBERED = 8
# The rate of the last seconds reaches back this many times the time to the first token.
_FAST_SPANS = 2.0


@dataclass(frozen=True, slots=True)
class Load:
    """Memory of the arrivals; rates are in requests per second."""

    fast: float = 0.0  # mean of the last seconds
    fast_span_s: float = 0.0  # how long that mean reaches back, at most
    open_s: float = 0.0  # seconds of the bucket being filled
    open_requests: float = 0.0
    rates: tuple[float, ...] = ()  # of the full buckets, the newest last

    @property
    def level(self) -> float:
        """Mean rate of the last full buckets, or of the last seconds before there is one."""
        return fmean(self.rates[-_LEVEL:] or (self.fast,))


@dataclass(frozen=True, slots=True)
class Surge:
    """The current surge, if `left_s` is not 0, and the share that earlier ones kept; rates are in
    requests per second."""

    rate: float = 0.0
    usual: float = 0.0  # forecast when it began
    left_s: float = 0.0
    kept: float = 1.0  # mean share of their rise that surges kept so far
    count: int = 1

    @property
    def expected(self) -> float:
        """The load to count on."""
        return self.usual + self.kept * (self.rate - self.usual)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Mean and standard deviation of the rate expected a cold start ahead."""

    mean: float
    sigma: float
    burst: float
    slope: float
    surge: bool


def bucket_s(cold_start_s: float) -> float:
    """Width of a bucket for this configured cold start."""
    return min(60.0, max(0.5, cold_start_s / BUCKETS_OF_COLD_START))


def fast_span_s(config: ScalingConfig) -> float:
    """How far back the rate of the last seconds reaches."""
    return _FAST_SPANS * config.slo.ttft_s


def observe(load: Load, rate: float, dt: float, span_s: float, width_s: float) -> Load:
    """The load after `dt` more seconds with `rate` requests per second."""
    seen = min(load.fast_span_s + dt, span_s)
    # An exponential mean, but a plain one until a whole span has been seen.
    weight = 1 - math.exp(-dt / seen) if load.fast_span_s else 1.0
    load = replace(
        load,
        fast=load.fast + weight * (rate - load.fast),
        fast_span_s=seen,
        open_s=load.open_s + dt,
        open_requests=load.open_requests + rate * dt,
    )
    if load.open_s < width_s:
        return load
    full = min(_KEPT, int(load.open_s / width_s))
    rates = (*load.rates, *[load.open_requests / load.open_s] * full)[-_KEPT:]
    return replace(load, open_s=0.0, open_requests=0.0, rates=rates)


def forecast(load: Load, surge: Surge, ahead: int, width_s: float) -> Forecast:
    """The rate that is expected `ahead` buckets from now."""
    if not load.rates:
        return Forecast(load.fast, 0.0, 1.0, 0.0, False)
    known = _extrapolated(load.rates, ahead, width_s)
    rise = surge.expected - known.mean
    if surge.left_s == 0 or rise <= 0:
        return known
    # A rise that has come true is no longer uncertain.
    sigma = max(0.0, known.sigma - rise / _SURPRISE)
    return replace(known, mean=surge.expected, sigma=sigma, surge=True)


# Nothing changes between two buckets: a service uses one entry, simulations use the others.
@lru_cache(maxsize=64)
def _extrapolated(rates: tuple[float, ...], ahead: int, width_s: float) -> Forecast:
    level, index = fmean(rates[-_LEVEL:]), burst(rates, width_s)
    slope = _slope(rates[-2 * ahead :], index * level / width_s)
    mean = level + slope * (ahead + _LEVEL / 2)
    # Differences of levels have the counting noise of both; only that of the newest matters.
    counting = index * level / width_s / _LEVEL
    sigma = math.sqrt(max(0.0, _sigma(rates, ahead) ** 2 - counting))
    return Forecast(mean, sigma, index, slope, False)


def surprise(load: Load, surge: Surge, known: Forecast, lasts_s: float) -> Surge:
    """The surge after reading the rate of the last seconds: a new one if the forecast does not
    explain that rate, or a higher one while a surge lasts."""
    # An exponential mean of time constant T averages like a window of 2 T.
    noise = math.sqrt(known.burst * known.mean / max(1e-9, 2 * load.fast_span_s))
    if surge.left_s:
        rate, explained = load.fast - noise, surge.rate
    else:
        rate, explained = load.fast, known.mean + _SURPRISE * math.hypot(noise, known.sigma)
    return noted(surge, rate, known.mean, lasts_s) if rate > explained else surge


def burst(rates: Sequence[float], width_s: float) -> float:
    """Variance over mean of the counts, from differences of neighbours to exclude slow change."""
    if len(rates) <= _LEVEL:
        return 1.0
    # Half a squared difference has the variance as its mean. A jump of the load does not move the
    # median, which is less by a constant factor (chi-square with one degree of freedom).
    indices = ((b - a) ** 2 * width_s / (a + b) for a, b in pairwise(rates) if a + b > 0)
    return min(_MOST_BURST, max(1.0, median([*indices, 0.0]) / 0.455))


def _slope(rates: Sequence[float], noise: float) -> float:
    """Rise of the rate per bucket, less what noise may cause; `noise` is a bucket's variance."""
    half = len(rates) // 2
    if half < _LEVEL:
        return 0.0
    older, newer = _regression(rates[:half]), _regression(rates[-half:])
    error = math.sqrt(12 * noise / (half**3 - half))
    return max(0.0, min(older, newer) - error)


def _regression(values: Sequence[float]) -> float:
    middle = (len(values) - 1) / 2
    mean = fmean(values)
    covariance = sum((i - middle) * (value - mean) for i, value in enumerate(values))
    return covariance / sum((i - middle) ** 2 for i in range(len(values)))


def _sigma(rates: Sequence[float], ahead: int) -> float:
    levels = [fmean(rates[max(0, i - _LEVEL + 1) : i + 1]) for i in range(len(rates))]
    changes = [later - earlier for earlier, later in zip(levels, levels[ahead:], strict=False)]
    usual = max(0.0, fmean(changes)) if changes else 0.0
    weights = [math.exp((i - len(changes)) / (_FORGET * ahead)) for i in range(len(changes))]
    rises = (w * max(0.0, change - usual) ** 2 for w, change in zip(weights, changes, strict=True))
    prior = _FORGET * ahead * math.exp(-len(changes) / (_FORGET * ahead))
    variance = (2 * sum(rises) + prior * (_UNKNOWN * levels[-1]) ** 2) / (sum(weights) + prior)
    return min(levels[-1], math.sqrt(variance))


def passed(surge: Surge, level: float, dt: float) -> Surge:
    """The surge after `dt` seconds. If it ends now, the present `level` says how much of it was
    kept."""
    if surge.left_s == 0:
        return surge
    if surge.left_s > dt:
        return replace(surge, left_s=surge.left_s - dt)
    rise = surge.rate - surge.usual
    kept = min(1.0, max(0.0, (level - surge.usual) / rise)) if rise > 0 else 1.0
    count = min(_REMEMBERED, surge.count + 1)
    return replace(surge, left_s=0.0, count=count, kept=surge.kept + (kept - surge.kept) / count)


def noted(surge: Surge, rate: float, usual: float, lasts_s: float) -> Surge:
    """A surge of this rate, in place of the current one if there is one."""
    usual = surge.usual if surge.left_s else usual
    return replace(surge, rate=rate, usual=usual, left_s=lasts_s)
