"""The compiled event loop of a fleet: arrivals, segments' ends, replicas that become ready."""

import numpy as np

from mars_ray.scaling.simulate.arrays import (
    DRAINING,
    ENDS,
    FAILED,
    FREE,
    HELD,
    HELD_HEAD,
    HELD_TAIL,
    LIVE,
    NEXT,
    NOBODY,
    PINNED,
    READIES,
    READY,
    REFUSED,
    SHED,
    STARTING,
    Fleet,
    Requests,
    Tables,
)
from mars_ray.scaling.simulate.compiled import compiled
from mars_ray.scaling.simulate.engine import begin, cut, end_segment
from mars_ray.scaling.simulate.tree import first_place, set_event


@compiled
def advance(
    fleet: Fleet, requests: Requests, tables: Tables, until_s: float, shed: float
) -> None:
    """All events up to `until_s`; of new unpinned requests a share `shed` is refused."""
    counts, arrivals = fleet.counts, requests.arrival_s
    while True:
        event_s = fleet.tree[1]
        more = counts[NEXT] < len(arrivals)
        if more and arrivals[counts[NEXT]] < event_s:
            if arrivals[counts[NEXT]] > until_s:
                return
            _arrive(fleet, requests, tables, counts[NEXT], shed)
            counts[NEXT] += 1
            continue
        if not event_s <= until_s:
            return
        place = first_place(fleet.tree)
        if fleet.status[place] == STARTING:
            _become_ready(fleet, requests, tables, place, event_s)
        else:
            end_segment(fleet, requests, tables, place, event_s)
            begin(fleet, requests, tables, place, event_s)
            if fleet.status[place] == DRAINING and fleet.steps[place] == 0:
                _free(fleet, place, event_s)


@compiled
def start(fleet: Fleet, count: int, now: float, ready_s: float, level: int) -> None:
    """As many replicas as there are places for, ready at `ready_s`."""
    for place in range(len(fleet.status)):
        if count == 0:
            return
        if fleet.status[place] == FREE:
            fleet.status[place] = STARTING
            fleet.born_s[place] = now
            fleet.level[place] = level
            fleet.counts[LIVE] += 1
            set_event(fleet.tree, place, ready_s)
            count -= 1


@compiled
def drain(fleet: Fleet, count: int, now: float) -> None:
    """Take replicas away: the youngest that still start, then those with the least to do."""
    while count > 0:
        chosen, best = NOBODY, np.inf
        for place in range(len(fleet.status)):
            value = np.inf
            if fleet.status[place] == STARTING:
                value = -1.0 - fleet.born_s[place]
            elif fleet.status[place] == READY:
                value = float(fleet.running[place] + fleet.waiting[place])
            if value < best:
                chosen, best = place, value
        if chosen == NOBODY:
            return
        starting = fleet.status[chosen] == STARTING
        fleet.status[chosen] = DRAINING
        if starting or fleet.steps[chosen] == 0:
            _free(fleet, chosen, now)
        _list_ready(fleet)
        count -= 1


@compiled
def kill(fleet: Fleet, requests: Requests, tables: Tables, place: int, now: float) -> None:
    """The replica is gone at once; what it had starts again elsewhere, or fails."""
    running = fleet.request_RB[place, : fleet.running[place]].copy()
    queued = fleet.head[place]
    _free(fleet, place, now)
    _list_ready(fleet)
    for request in running:
        _again(fleet, requests, tables, request, now)
    while queued != NOBODY:
        following = requests.behind[queued]
        requests.behind[queued] = NOBODY
        _again(fleet, requests, tables, queued, now)
        queued = following


@compiled
def set_level(fleet: Fleet, place: int, level: int, now: float) -> None:
    """In force from the next step on."""
    if fleet.level[place] != level:
        fleet.level[place] = level
        if fleet.status[place] != STARTING:
            cut(fleet, place, now)


@compiled
def _arrive(fleet: Fleet, requests: Requests, tables: Tables, request: int, shed: float) -> None:
    now = requests.arrival_s[request]
    pinned = requests.pinned[request] < len(tables.points_L) - 1
    fleet.counts[PINNED] += pinned
    if not pinned and requests.chance[request, 0] < shed:
        _end(fleet, requests, request, SHED, now)
    else:
        _route(fleet, requests, tables, request, now)


@compiled
def _route(fleet: Fleet, requests: Requests, tables: Tables, request: int, now: float) -> None:
    """To a replica's queue; with none ready, requests are held before the fleet."""
    if fleet.counts[READIES] == 0:
        if fleet.counts[HELD] >= tables.queue_limit:
            _end(fleet, requests, request, SHED, now)
            return
        if fleet.counts[HELD_HEAD] == NOBODY:
            fleet.counts[HELD_HEAD] = request
        else:
            requests.behind[fleet.counts[HELD_TAIL]] = request
        fleet.counts[HELD_TAIL] = request
        fleet.counts[HELD] += 1
        return
    place = _choose(fleet, requests, tables, request)
    if fleet.waiting[place] >= tables.queue_limit:
        _end(fleet, requests, request, SHED, now)
        return
    requests.replica[request] = place
    _enqueue(fleet, requests, place, request)
    if fleet.steps[place] == 0:
        begin(fleet, requests, tables, place, now)
    elif fleet.running[place] < fleet.request_RB.shape[1]:
        cut(fleet, place, now)


@compiled
def _choose(fleet: Fleet, requests: Requests, tables: Tables, request: int) -> int:
    """The least outstanding of two at random, or of all; equals by chance."""
    count = fleet.counts[READIES]
    first = int(requests.chance[request, 1] * count)
    best = fleet.ready[first]
    others, step = count - 1, 1
    if tables.two_choices and count > 1:
        others, step = 1, 1 + int(requests.chance[request, 2] * (count - 1))
    least = fleet.running[best] + fleet.waiting[best]
    for i in range(1, others + 1):
        place = fleet.ready[(first + i * step) % count]
        load = fleet.running[place] + fleet.waiting[place]
        if load < least:
            best, least = place, load
    return best


@compiled
def _enqueue(fleet: Fleet, requests: Requests, place: int, request: int) -> None:
    """Behind those of its priority."""
    fleet.waiting[place] += 1
    tail = fleet.tail[place]
    if tail == NOBODY:
        fleet.head[place] = fleet.tail[place] = request
        return
    if requests.priority[tail] <= requests.priority[request]:
        requests.behind[tail] = request
        fleet.tail[place] = request
        return
    before, here = NOBODY, fleet.head[place]
    while requests.priority[here] <= requests.priority[request]:
        before, here = here, requests.behind[here]
    requests.behind[request] = here
    if before == NOBODY:
        fleet.head[place] = request
    else:
        requests.behind[before] = request


@compiled
def _again(fleet: Fleet, requests: Requests, tables: Tables, request: int, now: float) -> None:
    requests.first_s[request] = np.nan
    requests.points[request] = 0
    requests.retries[request] += 1
    if requests.retries[request] > tables.max_retries:
        _end(fleet, requests, request, FAILED, now)
    else:
        _route(fleet, requests, tables, request, now)


@compiled
def _end(fleet: Fleet, requests: Requests, request: int, outcome: int, now: float) -> None:
    requests.outcome[request] = outcome
    requests.end_s[request] = now
    requests.end_log[fleet.counts[ENDS]] = request
    fleet.counts[ENDS] += 1
    fleet.counts[REFUSED] += outcome == SHED


@compiled
def _become_ready(
    fleet: Fleet, requests: Requests, tables: Tables, place: int, now: float
) -> None:
    fleet.status[place] = READY
    set_event(fleet.tree, place, np.inf)
    _list_ready(fleet)
    request = fleet.counts[HELD_HEAD]
    fleet.counts[HELD_HEAD] = fleet.counts[HELD_TAIL] = NOBODY
    fleet.counts[HELD] = 0
    while request != NOBODY:
        following = requests.behind[request]
        requests.behind[request] = NOBODY
        _route(fleet, requests, tables, request, now)
        request = following


@compiled
def _free(fleet: Fleet, place: int, now: float) -> None:
    fleet.spent_s[0] += now - fleet.born_s[place]
    fleet.status[place] = FREE
    fleet.counts[LIVE] -= 1
    fleet.running[place] = fleet.waiting[place] = fleet.steps[place] = 0
    fleet.head[place] = fleet.tail[place] = NOBODY
    set_event(fleet.tree, place, np.inf)


@compiled
def _list_ready(fleet: Fleet) -> None:
    count = 0
    for place in range(len(fleet.status)):
        if fleet.status[place] == READY:
            fleet.ready[count] = place
            count += 1
    fleet.counts[READIES] = count
