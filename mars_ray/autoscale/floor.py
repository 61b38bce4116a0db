"""The floor: replicas that are kept for what this service is known to get, now and at this hour.

    quantile  the smallest number of replicas such that of the last hour's demand only a share of
              1 - attainment came in windows that needed more (weighted by demand, since the
              objective counts requests, not windows)
    early     before an hour has been seen, in part the upper bound of a normal prediction from the
              windows that have (mean + t s sqrt(1 + 1/n)): few or unequal windows raise it
    unseen    what no window has shown yet: (1 + e^(-age / 20 min) * 2) times the usual demand
    season    the quantile of this hour, a week or else a day ago

The largest counts. A new service is therefore given room for three times its demand, and an old one
what its own record asks for.
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean, stdev

from mars_ray.autoscale.demand import KEPT, WINDOW_S, Demand

# How many times more than usual a service may get that nobody has watched yet, and how fast
# watching it makes that unlikely.
_UNSEEN, _WATCHED_S = 2.0, 1200.0
# A prediction from few windows goes at most so many times beyond the largest of them.
_BEYOND = 4.0
_HOUR_S, _DAY, _WEEK = 3600.0, 24, 168
# An hour's part that must be seen before the hour counts as known.
_SEEN_WINDOWS = 90
# Student's 99% quantiles by degrees of freedom.
_T99 = (31.8, 6.96, 4.54, 3.75, 3.36, 3.14, 3.0, 2.9, 2.82, 2.76)


@dataclass(frozen=True, slots=True)
class Floor:
    """Memory of days: the quantile of demand by hour of the week, and how long it was watched."""

    age_s: float = 0.0
    hour: int = -1  # the running hour of the week; -1 before the first
    seen: int = 0  # windows of the running hour
    hours: tuple[tuple[int, float], ...] = ()  # (hour of the week, replicas), sorted


def watch(floor: Floor, demand: Demand, full: bool, dt: float, wall_s: float, q: float) -> Floor:
    """The floor after `dt` seconds; `full` if a window has been filled, `wall_s` the wall clock.

    Hours of the week count from wherever the clock does: only their distance matters.
    """
    floor = replace(floor, age_s=floor.age_s + dt)
    if not full:
        return floor
    hour = int(wall_s // _HOUR_S) % _WEEK
    if hour == floor.hour:
        return replace(floor, seen=floor.seen + 1)
    hours = dict(floor.hours)
    if floor.seen >= _SEEN_WINDOWS:
        hours[floor.hour] = quantile(demand.windows[-floor.seen :], q)
    return replace(floor, hour=hour, seen=1, hours=tuple(sorted(hours.items())))


def replicas(floor: Floor, demand: Demand, ahead_s: float, wall_s: float, q: float) -> float:
    """Replicas to keep, at the set-point and with fractions, until `ahead_s` from now."""
    unseen = (1 + _UNSEEN * math.exp(-floor.age_s / _WATCHED_S)) * demand.usual
    hours = {int((wall_s + ahead) // _HOUR_S) for ahead in (0.0, ahead_s + WINDOW_S)}
    season = max(_season(floor, hour) for hour in hours)
    return max(_early(demand.windows, q), unseen, season)


def quantile(windows: tuple[float, ...], q: float) -> float:
    """The least demand such that windows of at most it hold a share `q` of all demand."""
    ordered = sorted(windows)
    total = math.fsum(ordered)
    sums = accumulate(ordered)
    return next((w for w, s in zip(ordered, sums, strict=True) if s >= q * total - 1e-9), 0.0)


def _early(windows: tuple[float, ...], q: float) -> float:
    known = quantile(windows, q)
    count = len(windows)
    if not 1 < count < KEPT:
        return known
    freedom = count - 1
    t = _T99[freedom - 1] if freedom <= len(_T99) else 2.33 + 4.3 / freedom
    bound = fmean(windows) + t * stdev(windows) * math.sqrt(1 + 1 / count)
    share = count / KEPT
    return max(known, share * known + (1 - share) * min(bound, _BEYOND * max(windows)))


def _season(floor: Floor, hour: int) -> float:
    """The quantile of this hour of the week, or else the newest of the same hour of other days."""
    known = dict(floor.hours)
    same = (known.get((hour - _DAY * days) % _WEEK) for days in (0, *range(1, 7)))
    return next((replicas for replicas in same if replicas is not None), 0.0)
