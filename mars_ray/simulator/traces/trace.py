"""A trace: requests with their arrival times and sizes."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mars_ray.errors import DataError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trace:
    """N requests by time of arrival; arrays of shape [N].

    A pinned threshold is the lowest that may serve the request, 0 if any may. A deadline counts
    from the arrival and is infinite if there is none. Lower priorities go first. `parent` is the
    index of an earlier request whose first `shared_tokens` tokens, of prompt and answer, this
    one's prompt begins with; -1 without one.
    """

    name: str
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    priority: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    deadline_s: Floats = field(default_factory=lambda: np.empty(0))
    pinned_threshold: Floats = field(default_factory=lambda: np.empty(0))
    parent: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    shared_tokens: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        count = len(self.arrival_s)
        defaults = {
            "priority": np.zeros(count, np.int64),
            "deadline_s": np.full(count, np.inf),
            "pinned_threshold": np.zeros(count),
            "parent": np.full(count, -1, np.int64),
            "shared_tokens": np.zeros(count, np.int64),
        }
        for name, values in defaults.items():
            if not len(getattr(self, name)):
                object.__setattr__(self, name, values)
            assert len(getattr(self, name)) == count
        assert len(self.prompt_tokens) == len(self.output_tokens) == count
        assert np.all(np.diff(self.arrival_s) >= 0)
        assert np.all(self.parent < np.arange(count))

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """Seconds until the last arrival."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    def part(self, start_s: float, duration_s: float | None) -> "Trace":
        """Arrivals in [start, start + duration), counted from its start. Raises DataError."""
        end_s = np.inf if duration_s is None else start_s + duration_s
        inside = np.flatnonzero((self.arrival_s >= start_s) & (self.arrival_s < end_s))
        if not len(inside):
            raise DataError(f"{self.name}: no request between {start_s:g} s and {end_s:g} s")
        return self._taken(inside, self.arrival_s[inside] - start_s)

    def scaled(self, factor: float, spread_s: float, rng: np.random.Generator) -> "Trace":
        """A trace of `factor` times as many requests: each is kept, dropped or repeated at random.

        Every copy moves later by up to `spread_s`, so that copies do not arrive together. Raises
        DataError if no request is left.
        """
        copies = np.full(len(self), int(factor))
        copies += rng.random(len(self)) < factor - int(factor)
        if not copies.any():
            raise DataError(
                f"{self.name}: of {len(self)} requests, {factor:g} times as many is none"
            )
        index = np.repeat(np.arange(len(self)), copies)
        moved = self.arrival_s[index] + rng.random(len(index)) * spread_s
        order = np.argsort(moved, kind="stable")
        return self._taken(index[order], moved[order])

    def _taken(self, index: NDArray[np.intp], arrival_s: Floats) -> "Trace":
        return Trace(
            self.name,
            arrival_s,
            self.prompt_tokens[index],
            self.output_tokens[index],
            self.priority[index],
            self.deadline_s[index],
            self.pinned_threshold[index],
            *self._families(index),
        )

    def _families(self, index: NDArray[np.intp]) -> tuple[Ints, Ints]:
        """Parents and shared tokens of the requests taken; who loses the parent shares nothing."""
        place = np.full(len(self) + 1, -1, np.int64)  # the last entry is that of no parent
        place[index[::-1]] = np.arange(len(index))[::-1]  # of copies the first
        parent = place[self.parent[index]]
        parent[parent >= np.arange(len(index))] = -1
        return parent, np.where(parent >= 0, self.shared_tokens[index], 0)
