"""What latencies say of a replica's capacity: the utilisation at which requests stay in time.

A replica's modelled capacity is that of a steady batch. How much of it can be used with requests
that come in bursts, of unequal length, unevenly routed, no model tells, so it is learnt. After each
window, with the largest demand per replica of the last ones as the load that was tried:

- more late than the objective allows, at a load that was believed to be carried: less is believed,
  by up to 15%, in proportion to how many were late;
- in time, at half of that load at least: more is believed, faster the fewer requests came near
  their limits. Replicas that are nearly empty teach nothing.

The objective is a share over time. Of the requests of the last hour, those that were late spend an
error budget (Google's Site Reliability Workbook, chapter 2). Above half of it, belief rises slowly.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

_FIRST = 0.7
_LEAST, _MOST = 0.2, 1.0
# The share by which less is believed when all are late or a tenth are; lateness above counts fully.
_LESS, _MANY_LATE = 0.15, 0.1
# The share by which more is believed after a window: always, and if no request came near a limit.
_MORE, _MUCH_MORE = 0.002, 0.012
_NEAR = 0.05  # a share of requests near their limits that leaves no room
# A load above the belief explains lateness; by this factor it does not count as above.
_ABOVE = 1.1
# A load below this share of the belief says nothing of whether more could be carried.
_TRIED = 0.5
_LOADS = 6  # windows over which lateness may come from an earlier load
_BUDGET_S = 3600.0
_HALF = 0.5  # of the error budget


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests that got their first token, and those among them found slow or late."""

    started: float = 0.0
    slow: float = 0.0  # above three quarters of a limit
    late: float = 0.0

    def plus(self, other: "Counts") -> "Counts":
        """The sum of both."""
        return Counts(self.started + other.started, self.slow + other.slow, self.late + other.late)

    def times(self, factor: float) -> "Counts":
        """Each count times a factor."""
        return Counts(self.started * factor, self.slow * factor, self.late * factor)

    def share(self, count: float) -> float:
        """A count as a share of all requests; a late answer may have started long ago."""
        return count / max(1e-9, self.started, self.late)


@dataclass(frozen=True, slots=True)
class Feedback:
    """Memory of what was tried, and of who was late."""

    utilisation: float = _FIRST
    loads: tuple[float, ...] = ()  # demand per ready replica of the last windows
    open_s: float = 0.0
    replica_s: float = 0.0  # of ready replicas, in the window being filled
    # By quality class, in the window being filled.
    counts: tuple[tuple[str, Counts], ...] = ()
    hour: Counts = Counts()  # all classes; older requests count less

    def spent(self, attainment: float) -> float:
        """Share of the error budget that the late requests of the last hour have spent."""
        return self.hour.share(self.hour.late) / (1 - attainment)


def observe(feedback: Feedback, counts: Mapping[str, Counts], ready: int, dt: float) -> Feedback:
    """The feedback after `dt` seconds with `ready` replicas, and the requests counted in them."""
    sums = dict(feedback.counts)
    for name, count in counts.items():
        sums[name] = sums.get(name, Counts()).plus(count)
    return replace(
        feedback,
        open_s=feedback.open_s + dt,
        replica_s=feedback.replica_s + ready * dt,
        counts=tuple(sorted(sums.items())),
    )


def learn(feedback: Feedback, needed: float, attainment: float) -> Feedback:
    """The feedback at the end of a window that needed this many replicas."""
    ready = max(1e-9, feedback.replica_s / max(1e-9, feedback.open_s))
    loads = (*feedback.loads, min(needed / ready, 1e3))[-_LOADS:]
    seen = Counts()
    for _, count in feedback.counts:
        seen = seen.plus(count)
    hour = feedback.hour.times(math.exp(-feedback.open_s / _BUDGET_S)).plus(seen)
    closed = replace(feedback, loads=loads, hour=hour, open_s=0.0, replica_s=0.0, counts=())
    if not seen.started and not seen.late:
        return closed
    late = max(count.share(count.late) for _, count in feedback.counts)
    if late > 1 - attainment:
        return closed if max(loads) >= _ABOVE * feedback.utilisation else _less(closed, late)
    if max(loads) < _TRIED * feedback.utilisation:
        return closed
    tight = closed.spent(attainment) >= _HALF
    return _more(closed, _NEAR if tight else seen.share(seen.slow))


def _less(feedback: Feedback, late: float) -> Feedback:
    believed = feedback.utilisation * (1 - _LESS * min(1.0, late / _MANY_LATE))
    return replace(feedback, utilisation=max(_LEAST, believed))


def _more(feedback: Feedback, near: float) -> Feedback:
    room = max(0.0, 1 - near / _NEAR)
    believed = feedback.utilisation * (1 + _MORE + _MUCH_MORE * room)
    return replace(feedback, utilisation=min(_MOST, believed))
