"""The slow loop: how many replicas the load a cold start ahead needs, and how many to ask for.

Rung 0 is the set-point. K_j is the requests per second of a replica at rung j, g_j = K_j / K_0, and
q_j the points lost there. Let x be the load to come, in replicas at the set-point. Its mean is
mu / K_0. Its variance is the forecast's (sigma / K_0)^2, plus that of the number of requests in the
system: burst * x / m for m sequences a replica (square-root staffing). N replicas

- carry the mean load at the set-point:                  N >= E x
- carry all but 1 - attainment of the loads at the floor: P(x > N g_last) <= 1 - attainment
- and are worth their price: one more is taken while the points it would save,
  price_point * E x * (E q(N) - E q(N + 1)), cost more than price_replica.

Load above the mean is noise and surprise, which the threshold absorbs. On a ladder of one rung
(nothing can be lowered, or lowering gains nothing) only the second condition remains.
`ScalingConfig.caution` scales the standard deviation of x: the largest of a window's estimates
exceeds a single one, and an operator may know the load better.

More replicas are asked for at once, fewer once fewer have been enough for a whole window, and none
when there has been no request for a while.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist

from mars_ray.autoscale.forecast import Forecast
from mars_ray.autoscale.operating_points import Rung
from mars_ray.config.scaling import ScalingConfig

_UNIT = NormalDist()
# Parts of the scale-down window whose maxima are kept: it slides by one part.
_PARTS = 4
# The mean answer is known after this many stays of a request in the system.
_STAYS = 4


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas that each condition asks for; the largest number counts."""

    mean: float
    floor: float
    priced: int

    @property
    def replicas(self) -> int:
        """Number of replicas that meets all conditions."""
        return max(_ceil(self.mean), _ceil(self.floor), self.priced)


def covered(config: ScalingConfig) -> float:
    """Share of the loads to come that replicas carry at the floor."""
    return _UNIT.cdf(config.caution * _UNIT.inv_cdf(config.slo.attainment))


def need(
    load: Forecast,
    rungs: Sequence[Rung],
    config: ScalingConfig,
    point_factor: float,
    extra_rate: float,
) -> Need:
    """Replicas for the load to come.

    `extra_rate` drains the queue; points cost `point_factor` times their price.
    """
    first, last = rungs[0], rungs[-1]
    gain = last.requests_per_s / first.requests_per_s
    mean = (load.mean + extra_rate) / first.requests_per_s
    spread = config.caution * math.hypot(
        load.sigma / first.requests_per_s, math.sqrt(load.burst * mean / first.sequences)
    )
    floor = (mean + _UNIT.inv_cdf(config.slo.attainment) * spread) / gain
    fewest, most = max(_ceil(mean), _ceil(floor)), config.max_replicas
    if spread == 0 or fewest >= most or len(rungs) == 1:
        return Need(mean, floor, fewest)
    loads = NormalDist(mean, spread)
    prices = config.prices
    price = prices.point_hour * point_factor / prices.replica_hour

    def pays(replicas: int) -> bool:
        saved = _points(replicas, rungs, loads) - _points(replicas + 1, rungs, loads)
        return price * mean * saved > 1

    # Above the mean load each further replica saves less, so from one on none is worth its price.
    low, high = fewest, most
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if pays(middle) else (low, middle)
    return Need(mean, floor, low)


def _points(replicas: int, rungs: Sequence[Rung], loads: NormalDist) -> float:
    """Expected points lost with `replicas`: each rung is used once the one above is full."""
    lost = 0.0
    for above, rung in pairwise(rungs):
        full = replicas * above.requests_per_s / rungs[0].requests_per_s
        lost += (rung.points_lost - above.points_lost) * (1 - loads.cdf(full))
    return lost


def _ceil(replicas: float) -> int:
    # 3.0000001 is 3: rounding of float means must not order a replica.
    return max(0, math.ceil(replicas - 1e-6))


@dataclass(frozen=True, slots=True)
class Fleet:
    """Memory of the replicas: how many were asked for and needed lately, and how long idle."""

    asked: int | None = None  # the last number asked for
    cold_start_s: float | None = None  # measured
    idle_s: float = 0.0  # time without a request
    age_s: float = 0.0
    # Most replicas needed in each part of the scale-down window; the last part is still running.
    enough: tuple[int, ...] = (0,)
    part_s: float = 0.0


def remember(fleet: Fleet, needed: int, busy: bool, dt: float, window_s: float) -> Fleet:
    """The fleet after `dt` seconds in which `needed` replicas were needed."""
    fleet = replace(fleet, age_s=fleet.age_s + dt)
    idle_s = 0.0 if busy else fleet.idle_s + dt
    enough = (*fleet.enough[:-1], max(fleet.enough[-1], needed))
    part_s = fleet.part_s + dt
    if part_s < window_s / _PARTS:
        return replace(fleet, idle_s=idle_s, enough=enough, part_s=part_s)
    return replace(fleet, idle_s=idle_s, enough=(*enough[-_PARTS:], needed), part_s=0.0)


def woken(fleet: Fleet, target: int) -> Fleet:
    """The fleet, with Serve's own target if Serve has left zero for a first request.

    Serve does so before any replica can report the request. The idle time starts again from 0.
    """
    return replace(fleet, asked=target, idle_s=0.0) if fleet.asked == 0 < target else fleet


def ask(
    fleet: Fleet, current: int, needed: int, stay_s: float | None, config: ScalingConfig
) -> int:
    """Replicas to ask for, when `current` were asked for so far.

    `stay_s` is how long requests are in the system, None without requests. Until several times that
    has passed, only the short answers have ended, so the cost of answers is not known.
    """
    busy = stay_s is not None
    idle = not busy and (not current or fleet.idle_s >= config.idle_to_zero_s)
    if config.scale_to_zero and idle:
        # Serve itself also goes to zero only from one.
        return 1 if current > 1 else 0
    known = len(fleet.enough) > _PARTS and fleet.age_s >= _STAYS * (stay_s or 0.0)
    fewer = min(current, max(fleet.enough)) if known else current
    return min(config.max_replicas, max(config.min_replicas, 1, needed, fewer))
