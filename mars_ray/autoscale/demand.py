"""How much arrives: requests counted in windows of 30 s, in replicas that they need.

A window needs as many replicas as its requests per second are times what one replica carries at
the set-point with all its sequences within the time per token (`operating_points.py`). The windows
of the last hour are kept, and the rate of the last seconds for what is younger than a window.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

WINDOW_S = 30.0
# Windows that are remembered: those of an hour.
KEPT = 120
# The newest windows' rates, from which the burst index is taken.
_RATES = 20
# A rate of seconds counts without this many standard deviations of its noise.
_NOISE = 2.0
# A burst index above the first is not believed; the second holds before anything is known.
_MOST_BURST, _UNKNOWN_BURST = 25.0, 4.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Memory of the arrivals."""

    fast_per_s: float = 0.0  # requests per second over the last seconds
    fast_span_s: float = 0.0  # how long that reaches back, at most
    open_s: float = 0.0  # seconds of the window being filled
    open_requests: float = 0.0
    windows: tuple[float, ...] = ()  # replicas that each full window needed, the newest last
    rates: tuple[float, ...] = ()  # requests per second of the newest of them

    @property
    def newest(self) -> float:
        """Replicas that the last two windows needed."""
        return fmean(self.windows[-2:] or (0.0,))

    @property
    def usual(self) -> float:
        """Replicas that the last five minutes needed."""
        return fmean(self.windows[-10:] or (0.0,))


def observe(demand: Demand, rate: float, dt: float, span_s: float, capacity: float) -> Demand:
    """The demand after `dt` more seconds with `rate` requests per second.

    A replica carries `capacity` requests per second; the fast rate reaches `span_s` back.
    """
    span = min(demand.fast_span_s + dt, span_s)
    # An exponential mean, but a plain one until a whole span has been seen.
    weight = 1 - math.exp(-dt / span) if demand.fast_span_s and span else 1.0
    demand = replace(
        demand,
        fast_per_s=demand.fast_per_s + weight * (rate - demand.fast_per_s),
        fast_span_s=span,
        open_s=demand.open_s + dt,
        open_requests=demand.open_requests + rate * dt,
    )
    if demand.open_s < WINDOW_S:
        return demand
    count = min(KEPT, int(demand.open_s / WINDOW_S))
    mean = demand.open_requests / demand.open_s
    return replace(
        demand,
        open_s=0.0,
        open_requests=0.0,
        windows=(*demand.windows, *[mean / capacity] * count)[-KEPT:],
        rates=(*demand.rates, *[mean] * count)[-_RATES:],
    )


def present(demand: Demand, capacity: float) -> float:
    """Replicas needed now: by the last windows, or by the last seconds where these surely need
    more."""
    if not demand.fast_span_s:
        return 0.0
    noise = math.sqrt(burst_index(demand.rates) * demand.fast_per_s / demand.fast_span_s)
    return max(demand.newest, (demand.fast_per_s - _NOISE * noise) / capacity)


def burst_index(rates: Sequence[float]) -> float:
    """Variance over mean of the counts of windows: 1 for Poisson arrivals.

    It comes from the differences of neighbours, so that slow change does not count. Half a squared
    difference has the variance as its mean; its median, which a jump of the load does not move, is
    less by a constant factor (chi-square with one degree of freedom).
    """
    indices = [(b - a) ** 2 * WINDOW_S / (a + b) for a, b in pairwise(rates) if a + b > 0]
    if len(indices) < 4:
        return _UNKNOWN_BURST
    return min(_MOST_BURST, max(1.0, median(indices) / 0.455))
