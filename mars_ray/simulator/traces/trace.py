"""A trace: requests with their arrival times and sizes; and others like a recorded one.

A seed's draw, or a trace of more or fewer requests, takes what comes independently of the rest:
sessions where the trace has them, otherwise bursts. Copies of single requests would keep the
recorded order of bursts in every seed, and ask for the same conversation many times at one moment.
"""

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
        place = np.arange(len(index))
        own = draw * len(self) + index
        wanted = np.where(self.parent[index] < 0, -1, draw * len(self) + self.parent[index])
        by_own = np.argsort(own, kind="stable")
        found = by_own[np.minimum(np.searchsorted(own, wanted, sorter=by_own), len(own) - 1)]
        is_parent = (own[found] == wanted) & (found < place)
        common = self.common_tokens if len(index) else 0
        parent = np.where(is_parent, found, place - 1 if common else -1)
        shared = np.where(is_parent, self.shared_tokens[index], common)
        return replace(drawn, parent=parent, shared_tokens=np.where(parent < 0, 0, shared))


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


# A session that is drawn begins up to this much earlier or later: copies are apart, hours are kept.
_MOVED_S = 60.0
# A burst ends where nobody comes for ten mean gaps: by chance one gap in 22,000 is longer.
_GAP_MEANS = 10.0
# Traffic without such gaps is cut into bursts of a minute (where it is thin, of ten such gaps).
_BURST_S = 60.0
# A burst takes the place of one that was recorded within half an hour, so that hours differ as
# recorded: the local block bootstrap (Paparoditis and Politis, 2002).
_NEAR_S = 1800.0


def resampled(trace: Trace, factor: float, anew: bool, rng: np.random.Generator) -> Trace:
    """About `factor` times as many requests in the same time; `anew` draws all of them.

    Otherwise it is the recorded trace itself, without some requests or with more. Raises DataError
    if no request is left.
    """
    if factor == 1 and not anew:
        return trace
    if np.any(trace.shared_tokens > trace.common_tokens):
        drawn = _sessions(trace, factor, anew, rng)
    else:
        drawn = _scaled(_bursts(trace, rng) if anew else trace, factor, rng)
    if not len(drawn):
        raise DataError(
            f"{trace.name}: of {len(trace)} requests, {factor:g} times as many is none; raise "
            "rate_factor"
        )
    return drawn


def _sessions(trace: Trace, factor: float, anew: bool, rng: np.random.Generator) -> Trace:
    """`factor` times as many sessions; those that are drawn with replacement move a little."""
    sessions = np.unique(trace.sessions(), return_inverse=True)[1]
    sizes = np.bincount(sessions)
    count = int(_rounded(np.array([factor * len(sizes)]), rng)[0])
    kept = np.arange(0)
    if not anew:
        kept = rng.permutation(len(sizes))[:count]
    drawn = np.concatenate([kept, rng.integers(len(sizes), size=count - len(kept))])
    rows = np.argsort(sessions, kind="stable")
    ends = np.cumsum(sizes)
    index = rows[_runs(ends[drawn] - sizes[drawn], sizes[drawn])]
    # No session leaves the trace's time.
    first_s, last_s = trace.arrival_s[rows[ends - sizes]], trace.arrival_s[rows[ends - 1]]
    earliest_s = np.maximum(-_MOVED_S, -first_s)[drawn]
    latest_s = np.minimum(_MOVED_S, trace.duration_s - last_s)[drawn]
    moved_s = earliest_s + rng.random(len(drawn)) * (latest_s - earliest_s)
    moved_s[: len(kept)] = 0
    draw = np.repeat(np.arange(len(drawn)), sizes[drawn])
    return trace.drawn(index, trace.arrival_s[index] + moved_s[draw], draw)


def _bursts(trace: Trace, rng: np.random.Generator) -> Trace:
    """Bursts with the silence behind them, one after the other, until the trace's time is over."""
    firsts, sizes = _burst_bounds(trace)
    start_s = trace.arrival_s[firsts]
    own_s = trace.arrival_s[firsts + sizes - 1] - start_s
    silence_s = np.diff(start_s) - own_s[:-1]
    # How long it is silent behind the last one was not recorded.
    length_s = own_s + np.append(silence_s, silence_s.mean() if len(silence_s) else 0)
    chosen: list[int] = []
    begin_s: list[float] = []
    at_s = start_s[0]
    while at_s <= trace.duration_s:
        low, high = np.searchsorted(start_s, [at_s - _NEAR_S, at_s + _NEAR_S]).tolist()
        # Within a long silence the burst before it is the nearest.
        low = min(low, high - 1)
        burst = int(rng.integers(max(low, 0), max(high, 1)))
        chosen.append(burst)
        begin_s.append(at_s)
        at_s += max(length_s[burst], _mean_gap_s(trace), 1e-6)
    index = _runs(firsts[chosen], sizes[chosen])
    shift_s = np.repeat(np.array(begin_s) - start_s[chosen], sizes[chosen])
    arrival_s = trace.arrival_s[index] + shift_s
    inside = arrival_s <= trace.duration_s
    return trace.drawn(index[inside], arrival_s[inside], np.arange(int(inside.sum())))


def _scaled(trace: Trace, factor: float, rng: np.random.Generator) -> Trace:
    """`factor` times as many requests in every burst, with the burst's own course of the rate.

    Those that are added come between two of the burst, and are drawn from all of it.
    """
    if factor <= 1:
        kept = np.flatnonzero(rng.random(len(trace)) < factor)
        return trace.drawn(kept, trace.arrival_s[kept])
    more = np.repeat(np.arange(len(trace)), _rounded(np.full(len(trace), factor - 1), rng))
    firsts, sizes = _burst_bounds(trace)
    burst = np.searchsorted(firsts, more, side="right") - 1
    added = firsts[burst] + (rng.random(len(more)) * sizes[burst]).astype(np.int64)
    gap_s = np.diff(trace.arrival_s, append=np.inf)
    # Behind a burst is silence: its last gap has those of its last request, if it has any gap.
    silence = gap_s > _GAP_MEANS * _mean_gap_s(trace)
    before = more - (silence[more] & (sizes[burst] > 1))
    gap_s[silence] = _mean_gap_s(trace)
    added_s = trace.arrival_s[before] + rng.random(len(more)) * gap_s[before]
    index = np.concatenate([np.arange(len(trace)), added])
    arrival_s = np.concatenate([trace.arrival_s, added_s])
    return trace.drawn(index, arrival_s, np.arange(len(index)))


def _burst_bounds(trace: Trace) -> tuple[Ints, Ints]:
    """First request and number of requests of every burst."""
    gap_s = _GAP_MEANS * _mean_gap_s(trace)
    begins = np.diff(trace.arrival_s, prepend=-np.inf) > gap_s
    run = np.cumsum(begins) - 1
    since_s = trace.arrival_s - trace.arrival_s[begins][run]
    minute = (since_s // max(_BURST_S, _GAP_MEANS * gap_s)).astype(np.int64)
    begins[1:] |= np.diff(minute) > 0
    firsts = np.flatnonzero(begins)
    return firsts, np.diff(firsts, append=len(trace))


def _mean_gap_s(trace: Trace) -> float:
    return float(trace.arrival_s[-1] - trace.arrival_s[0]) / len(trace)


def _runs(starts: Ints, sizes: Ints) -> Ints:
    """The numbers of all runs [start, start + size), one run after the other."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))


def _rounded(expected: Floats, rng: np.random.Generator) -> Ints:
    """Whole numbers of this mean: a fraction is one more with that probability."""
    whole = np.floor(expected)
    return (whole + (rng.random(len(expected)) < expected - whole)).astype(np.int64)
