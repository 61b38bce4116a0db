"""What the policy answers, and what it remembers between two ticks."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class State:
    """JSON-able: Ray Serve keeps it as a dict between ticks. `State()` knows nothing yet."""

    tick_s: float | None = None  # when the last tick was

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> "State":
        """The state that `to_dict` wrote; an empty table is a fresh one."""
        return cls(**table)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and why."""

    replicas: int
    threshold_setpoint: float | None  # None: publish nothing
    shed: float  # share of new unpinned requests to refuse with 429; 0 normally
    reason: str  # one sentence with the numbers that decided
    state: State
