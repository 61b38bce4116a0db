"""The floor: replicas that are kept for what this service is known to get, now and at this hour.

    quantile  the smallest number of replicas such that of the last hour's demand only a share of
              1 - attainment came in windows that needed more (weighted by demand, since the
              objective counts requests, not windows)
    unseen    what no window has shown yet:
              usual + e^(-age / 20 min) min(2.5 usual, 3.5 sqrt(usual))
    season    the quantile of this hour, a week or else a day ago

The largest counts. A new service is therefore given room for three and a half times its demand, a
large one for less, since what comes from many multiplies less, and an old one what its own record
asks for.
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate

from mars_ray.autoscale.demand import WINDOW_S, Demand

# How many times more than usual a service may get that nobody has watched yet, for a large one how
# many times the root of its replicas, and how fast watching it makes that unlikely.
_UNSEEN, _LARGE, _WATCHED_S = 2.5, 3.5, 1200.0
_HOUR_S, _DAY, _WEEK = 3600.0, 24, 168
# An hour's part that must be seen before the hour counts as known.
_SEEN_WINDOWS = 90


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
    usual = demand.usual
    most = min(_UNSEEN * usual, _LARGE * math.sqrt(usual))
    unseen = usual + math.exp(-floor.age_s / _WATCHED_S) * most
    hours = {int((wall_s + ahead) // _HOUR_S) for ahead in (0.0, ahead_s + WINDOW_S)}
    season = max(_season(floor, hour) for hour in hours)
    return max(quantile(demand.windows, q), unseen, season)


def quantile(windows: tuple[float, ...], q: float) -> float:
    """The least demand such that windows of at most it hold a share `q` of all demand."""
    ordered = sorted(windows)
    total = math.fsum(ordered)
    sums = accumulate(ordered)
    return next((w for w, s in zip(ordered, sums, strict=True) if s >= q * total - 1e-9), 0.0)


def _season(floor: Floor, hour: int) -> float:
    """The quantile of this hour of the week, or else the newest of the same hour of other days."""
    known = dict(floor.hours)
    same = (known.get((hour - _DAY * days) % _WEEK) for days in (0, *range(1, 7)))
    return next((replicas for replicas in same if replicas is not None), 0.0)
