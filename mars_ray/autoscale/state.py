"""The policy's answer, and its memory between two ticks."""

from dataclasses import dataclass, field

from mars_ray.autoscale.forecast import Load, Surge
from mars_ray.autoscale.operating_points import Rung
from mars_ray.autoscale.replica_count import Fleet
from mars_ray.autoscale.threshold_control import Quality
from mars_ray.autoscale.traffic import Traffic


@dataclass(frozen=True, slots=True)
class State:
    """The policy's memory; `State()` is an empty one.

    Except for `tick_s` it holds durations and no times, so a clock that jumps does no harm.
    """

    tick_s: float | None = None  # when the last tick was
    load: Load = field(default_factory=Load)
    surge: Surge = field(default_factory=Surge)
    traffic: Traffic = field(default_factory=Traffic)
    quality: Quality = field(default_factory=Quality)
    fleet: Fleet = field(default_factory=Fleet)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, the reason, and what to remember."""

    replicas: int
    threshold_setpoint: float | None  # None: publish nothing
    shed: float  # share of new unpinned requests to refuse with 429; 0 normally
    reason: str  # one sentence with the numbers that decided
    state: State
    # The rungs that a replica may choose from by itself (`LocalLoop`), the set-point first.
    rungs: tuple[Rung, ...] = ()
