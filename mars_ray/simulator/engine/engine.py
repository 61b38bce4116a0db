"""A replica's engine, from one change of its batch to the next.

It does continuous batching as in decode/scheduler.py: decoding sequences go first, and prompts get
the remaining rows, in order. As long as nothing arrives, finishes or changes its level, all steps
are of one kind, and only the cached context grows: step j of a segment takes step_s + j * growth_s.
So a segment's end, and the step in which a request may join, have closed forms. The result equals
that of single steps (tests/simulator/reference.py).
"""

import math

import numpy as np

from mars_ray.simulator.engine.arrays import (
    DONE,
    ENDS,
    FIRSTS,
    NOBODY,
    Floats,
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


@compiled
def first_place(tree: Floats) -> int:
    """The place whose event comes first; among equals the lowest."""
    leaves = len(tree) // 2
    node = 1
    while node < leaves:
        node = 2 * node if tree[2 * node] <= tree[2 * node + 1] else 2 * node + 1
    return node - leaves
