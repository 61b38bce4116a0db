"""How many replicas to ask for.

    N = max(floor, present + backlog) / utilisation

floor        for what is known and not known of this service (`floor.py`)
present      what arrives now (`demand.py`)
backlog      what has piled up by then, drained within a second cold start; replicas on their way
             are credited for the time that they will have served
utilisation  share of the modelled capacity at which requests are in time (`feedback.py`)

More are asked for at once, fewer once fewer have been enough for two cold starts, and none when
there has been no request for a while.
"""

import math
from dataclasses import dataclass, replace

from mars_ray.config.scaling import ScalingConfig

# Parts of the scale-down window whose maxima are kept: it slides by one part.
_PARTS = 4
_LEAST_WINDOW_S = 120.0
_COLD_STARTS = 2


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas needed, with fractions, by cause."""

    floor: float
    present: float
    backlog: float
    utilisation: float

    @property
    def replicas(self) -> int:
        """Number of replicas that meets both causes."""
        wanted = max(self.floor, self.present + self.backlog) / self.utilisation
        # 3.0000001 is 3: rounding of float means must not order a replica.
        return max(0, math.ceil(wanted - 1e-6))


@dataclass(frozen=True, slots=True)
class Fleet:
    """Memory of the replicas: how many were asked for and needed lately, and how long idle."""

    asked: int | None = None  # the last number asked for
    cold_start_s: float | None = None  # measured
    idle_s: float = 0.0  # time without a request
    # Most replicas needed in each part of the scale-down window; the last part is still running.
    enough: tuple[int, ...] = (0,)
    part_s: float = 0.0


def backlog(
    waiting: float, present: float, carried: float, starting_s: float, running: int, cold_s: float
) -> float:
    """Replicas that drain what will be waiting in `cold_s` seconds within as long again.

    A replica carries `carried` requests per second now; `present` is the demand in replicas;
    `starting_s` sums the seconds that replicas on their way have been starting for.
    """
    if waiting <= 0:
        return 0.0
    coming = waiting / carried + present * cold_s
    piled_up = coming - running * cold_s - starting_s
    return min(coming, max(0.0, piled_up)) / cold_s


def remember(fleet: Fleet, needed: int, busy: bool, dt: float, cold_s: float) -> Fleet:
    """The fleet after `dt` seconds in which `needed` replicas were needed."""
    idle_s = 0.0 if busy else fleet.idle_s + dt
    enough = (*fleet.enough[:-1], max(fleet.enough[-1], needed))
    part_s = fleet.part_s + dt
    if part_s < max(_LEAST_WINDOW_S, _COLD_STARTS * cold_s) / _PARTS:
        return replace(fleet, idle_s=idle_s, enough=enough, part_s=part_s)
    return replace(fleet, idle_s=idle_s, enough=(*enough[-_PARTS:], needed), part_s=0.0)


def woken(fleet: Fleet, target: int) -> Fleet:
    """The fleet, with Serve's own target if Serve has left zero for a first request.

    Serve does so before any replica can report the request. The idle time starts again from 0.
    """
    return replace(fleet, asked=target, idle_s=0.0) if fleet.asked == 0 < target else fleet


def ask(fleet: Fleet, current: int, needed: int, busy: bool, config: ScalingConfig) -> int:
    """Replicas to ask for, when `current` were asked for so far."""
    idle = not busy and (not current or fleet.idle_s >= config.idle_to_zero_s)
    if config.scale_to_zero and idle:
        # Serve itself also goes to zero only from one.
        return 1 if current > 1 else 0
    known = len(fleet.enough) > _PARTS
    fewer = min(current, max(fleet.enough)) if known else current
    return min(config.max_replicas, max(config.min_replicas, 1, needed, fewer))
