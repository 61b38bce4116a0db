"""What the policy answers, and what it remembers between two ticks."""

from dataclasses import asdict, dataclass, field
from typing import Any

from mars_ray.autoscale.fleet import Fleet
from mars_ray.autoscale.forecast import Load
from mars_ray.autoscale.ladder import Rung
from mars_ray.autoscale.quality import Quality
from mars_ray.autoscale.surge import Surge
from mars_ray.autoscale.traffic import Traffic

_PAIRS = ("class_shares", "gains")


@dataclass(frozen=True, slots=True)
class State:
    """JSON-able: Ray Serve keeps it as a dict between ticks. `State()` knows nothing yet.

    But for `tick_s` it holds durations, no times: a clock that jumps does no harm.
    """

    tick_s: float | None = None  # when the last tick was
    load: Load = field(default_factory=Load)
    surge: Surge = field(default_factory=Surge)
    traffic: Traffic = field(default_factory=Traffic)
    quality: Quality = field(default_factory=Quality)
    fleet: Fleet = field(default_factory=Fleet)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> "State":
        """The state that `to_dict` wrote; an empty table is a fresh one."""
        if not table:
            return cls()
        load = Load(**{**table["load"], "rates": tuple(table["load"]["rates"])})
        pairs = {name: tuple(map(tuple, table["traffic"][name])) for name in _PAIRS}
        traffic = Traffic(**{**table["traffic"], **pairs})
        fleet = Fleet(**{**table["fleet"], "enough": tuple(table["fleet"]["enough"])})
        surge, quality = Surge(**table["surge"]), Quality(**table["quality"])
        return cls(table["tick_s"], load, surge, traffic, quality, fleet)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and why."""

    replicas: int
    threshold_setpoint: float | None  # None: publish nothing
    shed: float  # share of new unpinned requests to refuse with 429; 0 normally
    reason: str  # one sentence with the numbers that decided
    state: State
    # What a replica may choose from by itself (`local.py`): the set-point first.
    rungs: tuple[Rung, ...] = ()
