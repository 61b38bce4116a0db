"""The compiled event loop of a fleet: arrivals, ends of segments, replicas that become ready."""

import numpy as np

from mars_ray.simulator.engine.arrays import (
    DRAINING,
    ENDS,
    FAILED,
    FREE,
    HELD,
    HELD_HEAD,
    HELD_TAIL,
    LEAST_OUTSTANDING,
    NEXT,
    NOBODY,
    OPEN,
    PINNED,
    PREFIX,
    READIES,
    READY,
    REFUSED,
    SENT,
    SHED,
    STARTING,
    Ints,
    Tables,
    World,
    compiled,
)
from mars_ray.simulator.engine.engine import begin, cut, end_segment, first_place, set_event

# As in serve/ingress/router.py: tokens that the table of sent prompts holds, those that it takes of
# one prompt, and the requests that a replica may have beyond the least loaded one.
TABLE_TOKENS = 65_536 * 16
TABLE_PROMPT_TOKENS = 512 * 16
MAX_IMBALANCE = 4


@compiled
def advance(world: World, tables: Tables, until_s: float, shed: float) -> None:
    """Process all events up to `until_s`, refusing a share `shed` of new unpinned requests."""
    while True:
        event_s, arrival_s = world.tree[1], np.inf
        if world.counts[NEXT] < len(world.requests):
            arrival_s = world.requests[world.counts[NEXT]].arrival_s
        if min(event_s, arrival_s) > until_s or min(event_s, arrival_s) == np.inf:
            return
        if arrival_s < event_s:
            world.counts[NEXT] += 1
            _arrive(world, tables, world.counts[NEXT] - 1, shed)
            continue
        place = first_place(world.tree)
        if world.replicas[place].status == STARTING:
            _become_ready(world, tables, place, event_s)
            continue
        end_segment(world, tables, place, event_s)
        begin(world, tables, place, event_s)
        if world.replicas[place].status == DRAINING and world.replicas[place].steps == 0:
            _free(world, place, event_s)


@compiled
def start(world: World, count: int, now: float, ready_s: float, level: int) -> None:
    """Start up to `count` replicas, limited by free places; they are ready at `ready_s`."""
    for place in range(len(world.replicas)):
        if count == 0:
            return
        replica = world.replicas[place]
        if replica.status == FREE:
            replica.status, replica.born_s, replica.level = STARTING, now, level
            replica.all_steps, replica.busy_s, replica.decode_rows = 0, 0.0, 0.0
            replica.prompt_steps, replica.prompt_rows = 0, 0
            set_event(world.tree, place, ready_s)
            count -= 1


@compiled
def drain(world: World, count: int, now: float) -> None:
    """Remove replicas: first the youngest starting ones, then those with the least work."""
    for _ in range(count):
        chosen, best = NOBODY, np.inf
        for place in range(len(world.replicas)):
            replica = world.replicas[place]
            value = np.inf
            if replica.status == STARTING:
                value = -1.0 - replica.born_s
            elif replica.status == READY:
                value = float(replica.running + replica.waiting)
            if value < best:
                chosen, best = place, value
        if chosen == NOBODY:
            return
        replica = world.replicas[chosen]
        idle = replica.status == STARTING or replica.steps == 0
        replica.status = DRAINING
        if idle:
            _free(world, chosen, now)
        _list_ready(world)


@compiled
def kill(world: World, tables: Tables, places: Ints, now: float) -> None:
    """Kill these replicas at once; their requests start again elsewhere, or fail."""
    for place in places:
        world.replicas[place].status = DRAINING
    _list_ready(world)
    for place in places:
        running = world.batch[place, : world.replicas[place].running].copy()
        queued = world.replicas[place].head
        _free(world, place, now)
        for sequence in running:
            _again(world, tables, sequence.request, now)
        while queued != NOBODY:
            following = world.requests[queued].behind
            world.requests[queued].behind = NOBODY
            _again(world, tables, queued, now)
            queued = following


@compiled
def set_levels(world: World, level: int, now: float) -> None:
    """Set the level of all replicas, from their next step on."""
    for place in range(len(world.replicas)):
        replica = world.replicas[place]
        if replica.level != level:
            replica.level = level
            if replica.status != STARTING:
                cut(world, place, now)


@compiled
def set_slowness(world: World, slowness: float, now: float) -> None:
    """Set the slowness of all replicas, from their next step on."""
    world.slowness[0] = slowness
    for place in range(len(world.replicas)):
        cut(world, place, now)


@compiled
def _arrive(world: World, tables: Tables, number: int, shed: float) -> None:
    request = world.requests[number]
    world.counts[PINNED] += request.pins
    if not request.pins and request.shed_at < shed:
        _end(world, number, SHED, request.arrival_s)
    else:
        _route(world, tables, number, request.arrival_s)


@compiled
def _route(world: World, tables: Tables, number: int, now: float) -> None:
    """Queue a request at a replica; if none is ready, hold it in front of the fleet."""
    if world.counts[READIES] == 0:
        _hold(world, tables, number, now)
        return
    place = _choose(world, tables, number)
    replica = world.replicas[place]
    if replica.waiting >= tables.queue_limit:
        _end(world, number, SHED, now)
        return
    _send(world, number, place)
    _enqueue(world, place, number)
    if replica.steps == 0:
        begin(world, tables, place, now)
    elif replica.running < world.batch.shape[1]:
        cut(world, place, now)


@compiled
def _hold(world: World, tables: Tables, number: int, now: float) -> None:
    counts = world.counts
    if counts[HELD] >= tables.queue_limit:
        _end(world, number, SHED, now)
        return
    if counts[HELD_HEAD] == NOBODY:
        counts[HELD_HEAD] = number
    else:
        world.requests[counts[HELD_TAIL]].behind = number
    counts[HELD_TAIL] = number
    counts[HELD] += 1


@compiled
def _send(world: World, number: int, place: int) -> None:
    """Note in the router's table who has the request."""
    request = world.requests[number]
    request.replica, request.sent_before = place, world.counts[SENT]
    world.counts[SENT] += max(0, min(request.prompt, TABLE_PROMPT_TOKENS) - request.shared)


@compiled
def _choose(world: World, tables: Tables, number: int) -> int:
    """The replica with the least outstanding, of two random ones or of all; ties are random.

    With routing by prefix, first the one that was sent the same beginning.
    """
    if tables.routing == PREFIX:
        place = _preferred(world, number)
        if place != NOBODY:
            return place
    count = world.counts[READIES]
    first = int(world.requests[number].one * count)
    others, step = count - 1, 1
    if tables.routing != LEAST_OUTSTANDING and count > 1:
        others, step = 1, 1 + int(world.requests[number].other * (count - 1))
    best = world.ready[first]
    least = world.replicas[best].running + world.replicas[best].waiting
    for i in range(1, others + 1):
        place = world.ready[(first + i * step) % count]
        load = world.replicas[place].running + world.replicas[place].waiting
        if load < least:
            best, least = place, load
    return int(best)


@compiled
def _preferred(world: World, number: int) -> int:
    """The ready replica that was sent the longest beginning of the prompt, as long as the router's
    table remembers it and it has hardly more requests than the least loaded one; else NOBODY."""
    parent = world.requests[number].parent
    while parent != NOBODY:
        other = world.requests[parent]
        if world.counts[SENT] - other.sent_before > TABLE_TOKENS:
            return NOBODY
        if other.replica != NOBODY:
            replica = world.replicas[other.replica]
            # The place may have a new replica, which was not sent that request.
            had = other.outcome == OPEN or other.first_s > replica.born_s
            if had and replica.status == READY:
                near = _extra(world, other.replica) <= MAX_IMBALANCE
                return int(other.replica) if near else NOBODY
        parent = other.parent
    return NOBODY


@compiled
def _extra(world: World, place: int) -> int:
    """How many requests a replica has beyond the least loaded one."""
    own = world.replicas[place].running + world.replicas[place].waiting
    least = own
    for i in range(world.counts[READIES]):
        other = world.replicas[world.ready[i]]
        least = min(least, other.running + other.waiting)
    return own - least


@compiled
def _enqueue(world: World, place: int, number: int) -> None:
    """Put a request into a replica's queue, behind those of its priority."""
    replica, request = world.replicas[place], world.requests[number]
    replica.waiting += 1
    if replica.tail == NOBODY:
        replica.head = replica.tail = number
        return
    if world.requests[replica.tail].priority <= request.priority:
        world.requests[replica.tail].behind = number
        replica.tail = number
        return
    before, here = NOBODY, replica.head
    while world.requests[here].priority <= request.priority:
        before, here = here, world.requests[here].behind
    request.behind = here
    if before == NOBODY:
        replica.head = number
    else:
        world.requests[before].behind = number


@compiled
def _again(world: World, tables: Tables, number: int, now: float) -> None:
    request = world.requests[number]
    request.first_s, request.points, request.lowest = np.nan, 0.0, 0
    request.replica = NOBODY
    request.retries += 1
    if request.retries > tables.max_retries:
        _end(world, number, FAILED, now)
    else:
        _route(world, tables, number, now)


@compiled
def _end(world: World, number: int, outcome: int, now: float) -> None:
    world.requests[number].outcome = outcome
    world.requests[number].end_s = now
    world.end_log[world.counts[ENDS]] = number
    world.counts[ENDS] += 1
    world.counts[REFUSED] += outcome == SHED


@compiled
def _become_ready(world: World, tables: Tables, place: int, now: float) -> None:
    world.replicas[place].status = READY
    set_event(world.tree, place, np.inf)
    _list_ready(world)
    number = world.counts[HELD_HEAD]
    world.counts[HELD_HEAD] = world.counts[HELD_TAIL] = NOBODY
    world.counts[HELD] = 0
    while number != NOBODY:
        following = world.requests[number].behind
        world.requests[number].behind = NOBODY
        _route(world, tables, number, now)
        number = following


@compiled
def _free(world: World, place: int, now: float) -> None:
    replica = world.replicas[place]
    world.spent_s[0] += now - replica.born_s
    replica.status = FREE
    replica.running = replica.waiting = replica.steps = replica.promised = 0
    replica.head = replica.tail = NOBODY
    set_event(world.tree, place, np.inf)


@compiled
def _list_ready(world: World) -> None:
    count = 0
    for place in range(len(world.replicas)):
        if world.replicas[place].status == READY:
            world.ready[count] = place
            count += 1
    world.counts[READIES] = count
