"""A replica's engine, from one change of its batch to the next.

Continuous batching as in decode/scheduler.py: sequences that decode go first, prompts get the rows
that are left, in order. As long as nothing arrives, finishes or changes its level, all steps are of
one kind, and only the cached context grows: step j of a segment takes step_s + j * growth_s. So a
segment's end, and the step in which something may join, have closed forms, and the result is that
of stepping one by one (reference.py).
"""

import math

import numpy as np

from mars_ray.scaling.simulate.arrays import (
    DONE,
    ENDS,
    FIRSTS,
    NOBODY,
    Fleet,
    Requests,
    Tables,
)
from mars_ray.scaling.simulate.compiled import compiled
from mars_ray.scaling.simulate.tree import set_event

# Tokens left below this are rounding.
_NONE_LEFT = 1e-6


@compiled
def elapsed_s(fleet: Fleet, place: int, steps: int) -> float:
    """Of the segment's first steps."""
    return steps * fleet.step_s[place] + fleet.growth_s[place] * steps * (steps - 1) / 2


@compiled
def cut(fleet: Fleet, place: int, now: float) -> None:
    """End the segment with the step that runs now, so that the next one can differ."""
    if fleet.steps[place] == 0:
        return
    gone = now - fleet.start_s[place]
    first, growth = fleet.step_s[place], fleet.growth_s[place]
    steps = gone / first
    if growth > 0:
        slope = first - growth / 2
        steps = (math.sqrt(slope * slope + 2 * growth * gone) - slope) / growth
    count = max(1, math.ceil(steps - 1e-9))
    if count < fleet.steps[place]:
        fleet.steps[place] = count
        set_event(fleet.tree, place, fleet.start_s[place] + elapsed_s(fleet, place, count))


@compiled
def begin(fleet: Fleet, requests: Requests, tables: Tables, place: int, now: float) -> None:
    """Start the next segment; an empty replica has none."""
    decoding = 0
    for i in range(fleet.running[place]):
        decoding += fleet.prompt_left_RB[place, i] == 0
    level = fleet.level[place]
    rows, tokens, context, steps = 0.0, 0.0, 0.0, np.iinfo(np.int64).max
    for i in range(fleet.running[place]):
        request = fleet.request_RB[place, i]
        left, prompt_left = fleet.output_left_RB[place, i], fleet.prompt_left_RB[place, i]
        context += requests.prompt[request] - prompt_left + requests.output[request] - left
        if prompt_left == 0:
            used = min(level, requests.pinned[request])
            rows += tables.rows_LB[used, decoding]
            tokens += tables.tokens_LB[used, decoding]
            need = math.ceil((left - _NONE_LEFT) / tables.tokens_LB[used, decoding])
            steps = min(steps, need)
    room = max(0, int(tables.step_tokens - rows))
    pending, first = _admit(fleet, requests, place, room)
    if fleet.running[place] == 0:
        fleet.steps[place] = 0
        set_event(fleet.tree, place, np.inf)
        return
    chunk = min(room, pending)
    if chunk > 0:
        # The first prompt fills steps alone until its last one, which others may share.
        steps = min(steps, max(1, (first + room - 1) // room - 1))
    full = min(rows + chunk, len(tables.seconds) - 1.001)
    below = int(full)
    step_s = tables.seconds[below] + (full - below) * (
        tables.seconds[below + 1] - tables.seconds[below]
    )
    fleet.start_s[place], fleet.steps[place] = now, steps
    fleet.step_s[place] = step_s + tables.cache_token_s * context
    fleet.growth_s[place] = tables.cache_token_s * (tokens + chunk)
    fleet.room[place], fleet.decoding[place] = room, decoding
    fleet.used_level[place] = level
    fleet.rows[place] = rows / max(1, decoding)
    set_event(fleet.tree, place, now + elapsed_s(fleet, place, steps))


@compiled
def _admit(fleet: Fleet, requests: Requests, place: int, room: int) -> tuple[int, int]:
    """From the queue into the batch while prompts do not fill a step.

    Returns the prompt tokens to forward, and those of the first prompt.
    """
    pending, first = 0, 0
    for i in range(fleet.running[place]):
        left = fleet.prompt_left_RB[place, i]
        first = first if first else left
        pending += left
    while (
        fleet.waiting[place]
        and fleet.running[place] < fleet.request_RB.shape[1]
        and pending < room
    ):
        request = fleet.head[place]
        fleet.head[place] = requests.behind[request]
        requests.behind[request] = NOBODY
        if fleet.head[place] == NOBODY:
            fleet.tail[place] = NOBODY
        fleet.waiting[place] -= 1
        i = fleet.running[place]
        fleet.request_RB[place, i] = request
        fleet.prompt_left_RB[place, i] = requests.prompt[request]
        fleet.output_left_RB[place, i] = requests.output[request]
        fleet.running[place] += 1
        first = first if first else requests.prompt[request]
        pending += requests.prompt[request]
    return pending, first


@compiled
def end_segment(fleet: Fleet, requests: Requests, tables: Tables, place: int, now: float) -> None:
    """Book what the segment's steps did. `begin` must follow."""
    steps, decoding = fleet.steps[place], fleet.decoding[place]
    give = steps * fleet.room[place]
    for i in range(fleet.running[place]):
        request = fleet.request_RB[place, i]
        prompt_left = fleet.prompt_left_RB[place, i]
        if prompt_left == 0:
            used = min(fleet.used_level[place], requests.pinned[request])
            tokens = steps * tables.tokens_LB[used, decoding]
            tokens = min(tokens, fleet.output_left_RB[place, i])
            fleet.output_left_RB[place, i] -= tokens
            fleet.made[place] += tokens
            requests.points[request] += tokens * tables.points_L[used]
            requests.lowest[request] = max(requests.lowest[request], used)
        elif give > 0:
            taken = min(give, prompt_left)
            give -= taken
            fleet.prompt_left_RB[place, i] -= taken
            if taken == prompt_left:
                # The prompt's last row gives the first token, the model's own choice.
                requests.first_s[request] = now
                requests.first_log[fleet.counts[FIRSTS]] = request
                fleet.counts[FIRSTS] += 1
                fleet.output_left_RB[place, i] -= 1
                fleet.made[place] += 1
    _leave(fleet, requests, place, now)


@compiled
def _leave(fleet: Fleet, requests: Requests, place: int, now: float) -> None:
    """Sequences that are complete; the others keep their order."""
    kept = 0
    for i in range(fleet.running[place]):
        request = fleet.request_RB[place, i]
        left, prompt_left = fleet.output_left_RB[place, i], fleet.prompt_left_RB[place, i]
        if prompt_left == 0 and left < _NONE_LEFT:
            requests.end_s[request] = now
            requests.outcome[request] = DONE
            requests.end_log[fleet.counts[ENDS]] = request
            fleet.counts[ENDS] += 1
            continue
        fleet.request_RB[place, kept] = request
        fleet.prompt_left_RB[place, kept] = prompt_left
        fleet.output_left_RB[place, kept] = left
        kept += 1
    fleet.running[place] = kept
