"""From what is needed to what is asked for: more at once, fewer after a window, none when idle."""

from dataclasses import dataclass, replace

from mars_ray.config.scaling import ScalingConfig

# Parts of the scale-down window whose maxima are kept: it slides by one part.
_PARTS = 4
# Stays of a request after which the mean answer is known.
_STAYS = 4


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is remembered of the replicas."""

    asked: int | None = None  # last
    cold_start_s: float | None = None  # measured
    idle_s: float = 0.0  # without a request
    age_s: float = 0.0
    # Most replicas that were needed, by part of the scale-down window; the last one is not over.
    enough: tuple[int, ...] = (0,)
    part_s: float = 0.0


def remember(fleet: Fleet, needed: int, busy: bool, dt: float, window_s: float) -> Fleet:
    """After `dt` seconds in which so many replicas were needed."""
    fleet = replace(fleet, age_s=fleet.age_s + dt)
    idle_s = 0.0 if busy else fleet.idle_s + dt
    enough = (*fleet.enough[:-1], max(fleet.enough[-1], needed))
    part_s = fleet.part_s + dt
    if part_s < window_s / _PARTS:
        return replace(fleet, idle_s=idle_s, enough=enough, part_s=part_s)
    return replace(fleet, idle_s=idle_s, enough=(*enough[-_PARTS:], needed), part_s=0.0)


def woken(fleet: Fleet, target: int) -> Fleet:
    """Serve itself wakes a fleet of none for the first request, before any replica can tell of it:
    what it asks for then holds, and the time without a request begins anew."""
    return replace(fleet, asked=target, idle_s=0.0) if fleet.asked == 0 < target else fleet


def ask(
    fleet: Fleet, current: int, needed: int, stay_s: float | None, config: ScalingConfig
) -> int:
    """Replicas to ask for, when `current` were asked for so far.

    `stay_s` is how long requests are in the system, None without any. Until several times that has
    passed, only the short answers have ended, and what answers cost is not known.
    """
    busy = stay_s is not None
    idle = not busy and (not current or fleet.idle_s >= config.idle_to_zero_s)
    if config.scale_to_zero and idle:
        # Serve, too, goes there from one only.
        return 1 if current > 1 else 0
    known = len(fleet.enough) > _PARTS and fleet.age_s >= _STAYS * (stay_s or 0.0)
    fewer = min(current, max(fleet.enough)) if known else current
    return min(config.max_replicas, max(config.min_replicas, 1, needed, fewer))
