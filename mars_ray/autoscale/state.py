"""The policy's answer, and its memory between two ticks."""

from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from mars_ray.autoscale.demand import Demand
from mars_ray.autoscale.feedback import Feedback
from mars_ray.autoscale.floor import Floor
from mars_ray.autoscale.operating_points import Rung
from mars_ray.autoscale.replica_count import Fleet, Need
from mars_ray.autoscale.traffic import Traffic
from mars_ray.autoscale.valve import Quality
from mars_ray.errors import DataError


@dataclass(frozen=True, slots=True)
class State:
    """The policy's memory; `State()` is an empty one.

    Except for `tick_s` it holds durations and no times, so a clock that jumps does no harm.
    """

    tick_s: float | None = None  # when the last tick was
    demand: Demand = field(default_factory=Demand)
    floor: Floor = field(default_factory=Floor)
    feedback: Feedback = field(default_factory=Feedback)
    traffic: Traffic = field(default_factory=Traffic)
    quality: Quality = field(default_factory=Quality)
    fleet: Fleet = field(default_factory=Fleet)

    def to_json(self) -> str:
        """What outlives the controller, as JSON."""
        return _MEMORY.dump_json(
            Memory(self.demand, self.floor, self.feedback, self.traffic)
        ).decode()

    def relearnt(self, text: str | None) -> "State":
        """This state with what `to_json` wrote in place of what it has learnt; None: nothing.

        Replicas and threshold stay. Raises DataError.
        """
        other = State() if text is None else State.from_json(text)
        return replace(
            self,
            demand=other.demand,
            floor=other.floor,
            feedback=other.feedback,
            traffic=other.traffic,
        )

    @classmethod
    def from_json(cls, text: str) -> "State":
        """A state that goes on from what `to_json` wrote. Raises DataError."""
        try:
            memory = _MEMORY.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise DataError(
                f"not a memory of the autoscaling policy: {place}: {first['msg']}"
            ) from None
        return cls(
            demand=memory.demand,
            floor=memory.floor,
            feedback=memory.feedback,
            traffic=memory.traffic,
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """The part of a state that is learnt from traffic, and so outlives the controller."""

    demand: Demand
    floor: Floor
    feedback: Feedback
    traffic: Traffic
    version: Literal[1] = 1  # of this layout; another one is not read


_MEMORY = TypeAdapter(Memory)


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
    needed: Need | None = None  # by what the number of replicas was chosen; None: it holds
