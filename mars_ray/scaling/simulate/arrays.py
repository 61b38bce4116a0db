"""What the compiled core works on: tuples of arrays.

N requests, R places for replicas, B sequences of a batch, L quality levels.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mars_ray.scaling.service_model import PLAIN, Level, Mix, ServiceModel
from mars_ray.scaling.traces.trace import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Status of a place.
FREE, STARTING, READY, DRAINING = range(4)
# Outcome of a request.
OPEN, DONE, SHED, FAILED = range(4)
# Places of `Fleet.counts`.
NEXT, HELD_HEAD, HELD_TAIL, HELD, READIES, FIRSTS, ENDS, REFUSED, PINNED, LIVE = range(10)
NOBODY = -1


class Tables(NamedTuple):
    """The service model, looked up by level and by how many sequences decode."""

    rows_LB: Floats  # positions of a sequence in a step
    tokens_LB: Floats  # it commits in a step
    points_L: Floats  # of accuracy lost per token
    seconds: Floats  # of a step, by rows
    cache_token_s: float
    step_tokens: int  # rows that a step may have
    queue_limit: int  # requests that may wait at a replica
    max_retries: int
    two_choices: bool


class Requests(NamedTuple):
    """Arrays of shape [N]; the first block is given, the second is what happened."""

    arrival_s: Floats
    prompt: Ints
    output: Ints
    priority: Ints
    pinned: Ints  # the lowest level that may serve it
    chance: Floats  # uniform, [N, 3]: for shedding and for routing
    first_s: Floats  # of the first token
    end_s: Floats
    points: Floats  # sum over tokens of points lost
    lowest: Ints  # level that served it
    replica: Ints
    outcome: Ints
    retries: Ints
    behind: Ints  # the next one in the same queue
    first_log: Ints  # requests by time of the first token; a retried one may be in it twice
    end_log: Ints  # requests by time of their end


class Fleet(NamedTuple):
    """Arrays of shape [R], batches [R, B]. A segment is steps of one kind in a row."""

    status: Ints
    level: Ints  # in force from the next step on
    born_s: Floats
    running: Ints
    waiting: Ints
    head: Ints
    tail: Ints
    start_s: Floats  # of the segment
    steps: Ints  # of the segment; 0: idle
    step_s: Floats  # its first step
    growth_s: Floats  # by which each step takes longer than the one before
    room: Ints  # rows of each step for prompts
    decoding: Ints  # sequences that decode in it
    used_level: Ints  # of the segment
    rows: Floats  # of a decoding sequence, mean over the batch
    made: Floats  # tokens since the beginning
    request_RB: Ints
    prompt_left_RB: Ints
    output_left_RB: Floats
    tree: Floats  # next event of each place, see tree.py
    ready: Ints  # places that take requests, the first READIES
    counts: Ints
    spent_s: Floats  # [1] of replicas that are gone


def make_requests(trace: Trace, thresholds: list[float], seed: int, retries: int) -> Requests:
    """`thresholds` of the levels, falling; a pinned request gets the lowest that it allows."""
    count = len(trace)
    rng = np.random.default_rng([seed, 2])
    pinned = [max(0, sum(t >= p for t in thresholds) - 1) for p in trace.pinned_threshold.tolist()]
    return Requests(
        arrival_s=trace.arrival_s,
        prompt=trace.prompt_tokens,
        output=trace.output_tokens,
        priority=trace.priority,
        pinned=np.array(pinned, np.int64),
        chance=rng.random((count, 3)),
        first_s=np.full(count, np.nan),
        end_s=np.full(count, np.nan),
        points=np.zeros(count),
        lowest=np.zeros(count, np.int64),
        replica=np.full(count, NOBODY),
        outcome=np.zeros(count, np.int64),
        retries=np.zeros(count, np.int64),
        behind=np.full(count, NOBODY),
        first_log=np.zeros(count * (retries + 1), np.int64),
        end_log=np.zeros(count, np.int64),
    )


def make_fleet(places: int, batch: int) -> Fleet:
    """Nobody there yet."""
    leaves = 1 << max(0, places - 1).bit_length()

    def ints() -> Ints:
        return np.zeros(places, np.int64)

    def floats() -> Floats:
        return np.zeros(places)

    counts = np.zeros(10, np.int64)
    counts[HELD_HEAD] = counts[HELD_TAIL] = NOBODY
    return Fleet(
        status=ints(),
        level=ints(),
        born_s=floats(),
        running=ints(),
        waiting=ints(),
        head=np.full(places, NOBODY),
        tail=np.full(places, NOBODY),
        start_s=floats(),
        steps=ints(),
        step_s=floats(),
        growth_s=floats(),
        room=ints(),
        decoding=ints(),
        used_level=ints(),
        rows=floats(),
        made=floats(),
        request_RB=np.zeros((places, batch), np.int64),
        prompt_left_RB=np.zeros((places, batch), np.int64),
        output_left_RB=np.zeros((places, batch)),
        tree=np.full(2 * leaves, np.inf),
        ready=ints(),
        counts=counts,
        spent_s=np.zeros(1),
    )


def make_tables(
    model: ServiceModel,
    levels: tuple[Level, ...],
    mix: Mix,
    *,
    step_tokens: int,
    queue_limit: int,
    max_retries: int,
    two_choices: bool,
) -> Tables:
    """The window of a level is what the engine's control would pick at that batch."""
    sizes = range(model.max_batch + 1)
    shapes = [[model.at(level, b, mix).shape if b else PLAIN for b in sizes] for level in levels]
    rows = np.array([[shape.positions for shape in line] for line in shapes])
    most = step_tokens + math.ceil(model.max_batch * rows.max()) + 2
    return Tables(
        rows_LB=rows,
        tokens_LB=np.array([[shape.tokens_per_forward for shape in line] for line in shapes]),
        points_L=np.array([level.points_lost for level in levels]),
        seconds=np.array([model.step_s(max(1, n)) for n in range(most)]),
        cache_token_s=model.cache_token_s,
        step_tokens=step_tokens,
        queue_limit=queue_limit,
        max_retries=max_retries,
        two_choices=two_choices,
    )
