"""Other traces like a recorded one: a seed's draw from it, and one of more or fewer requests.

What is drawn is what comes independently of the rest: sessions where the trace has them, otherwise
bursts. Copies of single requests would keep the recorded order of bursts in every seed, and ask for
the same conversation many times at one moment.
"""

import numpy as np

from mars_ray.errors import DataError
from mars_ray.simulator.traces.trace import Floats, Ints, Trace

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
