"""The compiled core: a replica's engine from one change of its batch to the next, and the event
loop of a fleet: arrivals, ends of segments, replicas that become ready.

The engine does continuous batching as in decode/scheduler.py: decoding sequences go first, and
prompts get the remaining rows, in order. As long as nothing arrives, finishes or changes its level,
all steps are of one kind, and only the cached context grows: step j of a segment takes
step_s + j * growth_s. So a segment's end, and the step in which a request may join, have closed
forms. The result equals that of single steps (tests/simulator/reference.py).
"""

import math

import numpy as np

from mars_ray.simulator.engine.arrays import (
    DONE,
    DRAINING,
    ENDS,
    FAILED,
    FIRSTS,
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
    Floats,
    Ints,
    Tables,
    World,
    compiled,
)

# Fewer remaining tokens than this are a rounding error.
NONE_LEFT = 1e-6
_FOREVER = np.iinfo(np.int64).max


@compiled
def cut(world: World, place: int, now: float) -> None:
    """End the segment with the current step, so that the next one can differ."""
    replica = world.replicas[place]
    if replica.steps == 0:
        return
    gone, first, growth = now - replica.start_s, replica.step_s, replica.growth_s
    steps = gone / first
    if growth > 0:
        # The solution n of n * first + growth * n * (n - 1) / 2 = gone.
        slope = first - growth / 2
        steps = (math.sqrt(slope * slope + 2 * growth * gone) - slope) / growth
    count = max(1, math.ceil(steps - 1e-9))
    if count < replica.steps:
        replica.steps = count
        set_event(world.tree, place, replica.start_s + _elapsed_s(first, growth, count))


@compiled
def begin(world: World, tables: Tables, place: int, now: float) -> None:
    """Start the next segment; an empty replica has none."""
    replica = world.replicas[place]
    level = replica.level
    decoding = 0
    for i in range(replica.running):
        decoding += world.batch[place, i].prompt_left == 0
    rows, tokens, context, steps = 0.0, 0.0, 0.0, _FOREVER
    for i in range(replica.running):
        sequence = world.batch[place, i]
        request = world.requests[sequence.request]
        context += request.prompt - sequence.prompt_left + request.output - sequence.output_left
        if sequence.prompt_left == 0:
            used = min(level, request.pinned)
            pace = step_tokens(tables, used, decoding, request.gain)
            rows += tables.rows_LB[used, decoding]
            tokens += pace
            steps = min(steps, math.ceil((sequence.output_left - NONE_LEFT) / pace))
    room = max(0, int(tables.step_tokens - rows))
    before = replica.running
    pending, first = _admit(world, tables, place, room)
    for i in range(before, replica.running):
        context += world.requests[world.batch[place, i].request].found
    if replica.running == 0:
        replica.steps = 0
        set_event(world.tree, place, np.inf)
        return
    chunk = min(room, pending)
    if chunk > 0:
        # The first prompt fills its steps alone, except the last, which others may share.
        steps = min(steps, max(1, (first - 1) // room))
    slowness = float(world.slowness[0])
    first_s = step_s(tables, rows + chunk) + tables.cache_token_s * context
    first_s += tables.prompt_attention_s * _pairs(world, place, chunk)
    growth_s = tables.cache_token_s * (tokens + chunk) + tables.prompt_attention_s * chunk * chunk
    replica.start_s, replica.steps = now, steps
    replica.step_s, replica.growth_s = slowness * first_s, slowness * growth_s
    replica.room, replica.decoding, replica.used_level = room, decoding, level
    replica.rows, replica.chunk = rows / max(1, decoding), chunk
    set_event(world.tree, place, now + _elapsed_s(replica.step_s, replica.growth_s, steps))


@compiled
def step_s(tables: Tables, rows: float) -> float:
    """Seconds of a step without the cost of its cached context."""
    rows = min(rows, len(tables.seconds) - 1.001)
    below = int(rows)
    low, high = tables.seconds[below], tables.seconds[below + 1]
    return low + (rows - below) * (high - low)


@compiled
def step_tokens(tables: Tables, level: int, decoding: int, gain: float) -> float:
    """Tokens that a sequence commits in a step; masks bring it `gain` times as many as others."""
    rows = tables.rows_LB[level, decoding]
    least = min(1.0, rows)
    return min(rows, least + gain * (tables.tokens_LB[level, decoding] - least))


@compiled
def _pairs(world: World, place: int, chunk: int) -> float:
    """Pairs of a prompt's row in the next step and a token before it in the prompt.

    If more steps of the segment follow, all of their rows are the first prompt's, and each has
    chunk * chunk pairs more than the one before.
    """
    pairs, i = 0.0, 0
    while chunk > 0:
        sequence = world.batch[place, i]
        i += 1
        if sequence.prompt_left > 0:
            taken = min(chunk, sequence.prompt_left)
            before = world.requests[sequence.request].prompt - sequence.prompt_left
            pairs += taken * (before + 0.5 * taken)
            chunk -= taken
    return pairs


@compiled
def end_segment(world: World, tables: Tables, place: int, now: float) -> None:
    """Record the results of the segment's steps. `begin` must follow."""
    replica = world.replicas[place]
    replica.all_steps += replica.steps
    replica.busy_s += now - replica.start_s
    replica.decode_rows += replica.steps * replica.decoding * replica.rows
    replica.prompt_steps += replica.steps * (replica.chunk > 0)
    replica.prompt_rows += replica.steps * replica.chunk
    give = replica.steps * replica.room
    for i in range(replica.running):
        sequence = world.batch[place, i]
        request = world.requests[sequence.request]
        if sequence.prompt_left == 0:
            used = min(replica.used_level, request.pinned)
            pace = step_tokens(tables, used, replica.decoding, request.gain)
            made = min(replica.steps * pace, sequence.output_left)
            sequence.output_left -= made
            request.points += made * tables.points_L[used]
            request.lowest = max(request.lowest, used)
        elif give > 0:
            taken = min(give, sequence.prompt_left)
            give -= taken
            sequence.prompt_left -= taken
            if sequence.prompt_left == 0:
                # The prompt's last row yields the first token, the model's own choice.
                sequence.output_left -= 1
                request.first_s = now
                world.first_log[world.counts[FIRSTS]] = sequence.request
                world.counts[FIRSTS] += 1
    _leave(world, place, now)


@compiled
def _elapsed_s(first_s: float, growth_s: float, steps: int) -> float:
    return steps * first_s + growth_s * steps * (steps - 1) / 2


@compiled
def _admit(world: World, tables: Tables, place: int, room: int) -> tuple[int, int]:
    """Take requests from the queue into the batch while prompts do not fill a step.

    The cache must have room for all future tokens of a sequence: unlike in the real engine, no
    sequence is sent back later. A sequence that is too long for the cache runs alone. Returns the
    prompt tokens to forward, and those of the first prompt.
    """
    replica = world.replicas[place]
    pending, first = 0, 0
    for i in range(replica.running):
        left = world.batch[place, i].prompt_left
        first = first if first else left
        pending += left
    while replica.waiting and replica.running < world.batch.shape[1] and pending < room:
        number = replica.head
        request = world.requests[number]
        need = request.prompt + request.output
        if replica.running and replica.promised + need > tables.cache_tokens:
            break
        request.found = _found(world, tables, place, number)
        replica.promised += need
        replica.head, request.behind = request.behind, NOBODY
        if replica.head == NOBODY:
            replica.tail = NOBODY
        replica.waiting -= 1
        sequence = world.batch[place, replica.running]
        sequence.request = number
        sequence.prompt_left = request.prompt - request.found
        sequence.output_left = request.output
        replica.running += 1
        first = first if first else sequence.prompt_left
        pending += sequence.prompt_left
    return pending, first


@compiled
def _found(world: World, tables: Tables, place: int, number: int) -> int:
    """Tokens of a prompt that are in the replica's cache, in whole pages.

    An earlier request's tokens are there while it runs, and then until as many others have been
    freed as the cache holds beside the running ones: the longest unused go first. Of one that was
    served elsewhere, the one that it shares tokens with may be here.
    """
    request, replica = world.requests[number], world.replicas[place]
    shared, parent = request.shared, request.parent
    while parent != NOBODY and shared >= tables.page_tokens:
        other = world.requests[parent]
        if other.replica == place and other.first_s > replica.born_s:
            known, younger = other.prompt, 0
            if other.outcome == DONE:
                known, younger = known + other.output - 1, replica.freed - other.freed_before
            if younger + replica.promised <= tables.cache_tokens:
                # The last token's row is needed itself, not only what the cache holds of it.
                tokens = min(shared, known, request.prompt - 1)
                return tokens // tables.page_tokens * tables.page_tokens
        shared, parent = min(shared, other.shared), other.parent
    return 0


@compiled
def _leave(world: World, place: int, now: float) -> None:
    """Take complete sequences out of the batch; the others keep their order."""
    replica = world.replicas[place]
    kept = 0
    for i in range(replica.running):
        sequence = world.batch[place, i]
        if sequence.prompt_left == 0 and sequence.output_left < NONE_LEFT:
            request = world.requests[sequence.request]
            request.end_s, request.outcome = now, DONE
            replica.promised -= request.prompt + request.output
            # Found tokens were in the cache before, and become the youngest.
            request.freed_before = replica.freed
            replica.freed += request.prompt + request.output - request.found
            world.end_log[world.counts[ENDS]] = sequence.request
            world.counts[ENDS] += 1
            continue
        if kept < i:
            world.batch[place, kept] = sequence
        kept += 1
    replica.running = kept


@compiled
def set_event(tree: Floats, place: int, at_s: float) -> None:
    """Set the time of the place's next event; infinite for none."""
    node = len(tree) // 2 + place
    tree[node] = at_s
    node //= 2
    while node >= 1:
        tree[node] = min(tree[2 * node], tree[2 * node + 1])
        node //= 2


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
            number = world.counts[NEXT]
            world.counts[NEXT] += 1
            request = world.requests[number]
            world.counts[PINNED] += request.pins
            if not request.pins and request.shed_at < shed:
                _end(world, number, SHED, request.arrival_s)
            else:
                _route(world, tables, number, request.arrival_s)
            continue
        # The place whose event comes first; among equals the lowest.
        leaves, node = len(world.tree) // 2, 1
        while node < leaves:
            node = 2 * node if world.tree[2 * node] <= world.tree[2 * node + 1] else 2 * node + 1
        place = node - leaves
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
def _route(world: World, tables: Tables, number: int, now: float) -> None:
    """Queue a request at a replica; if none is ready, hold it in front of the fleet."""
    counts = world.counts
    if counts[READIES] == 0:
        if counts[HELD] >= tables.queue_limit:
            _end(world, number, SHED, now)
            return
        if counts[HELD_HEAD] == NOBODY:
            counts[HELD_HEAD] = number
        else:
            world.requests[counts[HELD_TAIL]].behind = number
        counts[HELD_TAIL] = number
        counts[HELD] += 1
        return
    place = _choose(world, tables, number)
    replica = world.replicas[place]
    if replica.waiting >= tables.queue_limit:
        _end(world, number, SHED, now)
        return
    # The router's table notes who has the request.
    request = world.requests[number]
    request.replica, request.sent_before = place, world.counts[SENT]
    world.counts[SENT] += max(0, min(request.prompt, TABLE_PROMPT_TOKENS) - request.shared)
    _enqueue(world, place, number)
    if replica.steps == 0:
        begin(world, tables, place, now)
    elif replica.running < world.batch.shape[1]:
        cut(world, place, now)


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
                least = own = replica.running + replica.waiting
                for i in range(world.counts[READIES]):
                    one = world.replicas[world.ready[i]]
                    least = min(least, one.running + one.waiting)
                return int(other.replica) if own - least <= MAX_IMBALANCE else NOBODY
        parent = other.parent
    return NOBODY


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
