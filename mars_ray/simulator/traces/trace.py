"""A trace: requests with their arrival times and sizes."""

from dataclasses import dataclass, field, fields, replace

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
    index of an earlier request whose context begins as this prompt does for `shared_tokens`
    tokens, more than any other's; -1 and 0 where nothing is shared.
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
        assert np.all(self.shared_tokens <= np.where(self.parent < 0, 0, self.prompt_tokens))

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """Seconds until the last arrival."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    @property
    def common_tokens(self) -> int:
        """Tokens with which all prompts begin, such as a system prompt."""
        # Who shares this much with some earlier request shares it with the first one.
        return int(self.shared_tokens[1:].min()) if len(self) > 1 else 0

    def sessions(self) -> Ints:
        """The session of each request [N]: the index of its first one.

        A request belongs to its parent's if they share more than what all prompts begin with.
        """
        first = np.arange(len(self))
        for index in np.flatnonzero(self.shared_tokens > self.common_tokens).tolist():
            first[index] = first[self.parent[index]]
        return first

    def part(self, start_s: float, duration_s: float | None) -> "Trace":
        """Arrivals in [start, start + duration), counted from its start. Raises DataError."""
        end_s = np.inf if duration_s is None else start_s + duration_s
        inside = np.flatnonzero((self.arrival_s >= start_s) & (self.arrival_s < end_s))
        if not len(inside):
            raise DataError(f"{self.name}: no request between {start_s:g} s and {end_s:g} s")
        return self.drawn(inside, self.arrival_s[inside] - start_s)

    def spread(self, spread_s: float, rng: np.random.Generator) -> "Trace":
        """Every arrival later by up to `spread_s`; requests of a session keep their order."""
        if not spread_s:
            return self
        moved = self.arrival_s + rng.random(len(self)) * spread_s
        sessions = self.sessions()
        in_order = np.empty_like(moved)
        in_order[np.argsort(sessions, kind="stable")] = moved[np.lexsort((moved, sessions))]
        return self.drawn(np.arange(len(self)), in_order)

    def drawn(self, index: Ints, arrival_s: Floats, draw: Ints | None = None) -> "Trace":
        """The trace of these requests [M] at these times.

        Requests of one `draw` stay parents of each other (default: all are of one). Whose parent
        is not among them shares what all prompts begin with, with the request before it.
        """
        order = np.argsort(arrival_s, kind="stable")
        index, arrival_s = index[order], arrival_s[order]
        draw = np.zeros_like(index) if draw is None else draw[order]
        drawn = Trace(
            self.name,
            arrival_s,
            self.prompt_tokens[index],
            self.output_tokens[index],
            self.priority[index],
            self.deadline_s[index],
            self.pinned_threshold[index],
        )
        if not self.shared_tokens.any():
            return drawn
        parent, shared = self._parents(index, draw)
        return replace(drawn, parent=parent, shared_tokens=shared)

    def _parents(self, index: Ints, draw: Ints) -> tuple[Ints, Ints]:
        """`parent` and `shared_tokens` [M] of requests drawn from this trace."""
        place = np.arange(len(index))
        own = draw * len(self) + index
        wanted = np.where(self.parent[index] < 0, -1, draw * len(self) + self.parent[index])
        by_own = np.argsort(own, kind="stable")
        found = by_own[np.minimum(np.searchsorted(own, wanted, sorter=by_own), len(own) - 1)]
        is_parent = (own[found] == wanted) & (found < place)
        common = self.common_tokens if len(index) else 0
        parent = np.where(is_parent, found, place - 1 if common else -1)
        shared = np.where(is_parent, self.shared_tokens[index], common)
        return parent, np.where(parent < 0, 0, shared)


def within_context(trace: Trace, max_model_len: int | None) -> Trace:
    """The requests that a model of this context serves.

    A prompt without room for one token is refused with a 400 by the ingress or the engine, whatever
    the fleet, so it is left out. A longer answer ends where the context does
    (`LLMServer._made`, `decode/request.py: check_request`). Raises DataError if none is left.
    """
    if max_model_len is None:
        return trace
    kept = np.flatnonzero(trace.prompt_tokens < max_model_len)
    if not len(kept):
        raise DataError(f"{trace.name}: no prompt fits into a context of {max_model_len:,} tokens")
    columns = {each.name: getattr(trace, each.name)[kept] for each in fields(trace)[1:]}
    room = max_model_len - columns["prompt_tokens"]
    place = np.full(len(trace) + 1, -1, np.int64)  # the last entry is that of no parent
    place[kept] = np.arange(len(kept))
    parent = place[columns["parent"]]
    changed = {
        "output_tokens": np.minimum(columns["output_tokens"], room),
        "parent": parent,
        "shared_tokens": np.where(parent >= 0, columns["shared_tokens"], 0),
    }
    return replace(trace, **columns | changed)
