"""Work before traffic comes: run every kernel once, and measure the cost of steps."""

import time
from collections.abc import Iterator

import torch

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.core.step_cost import StepCost, row_counts
from mars_ray.decode.attention.backend import Backend
from mars_ray.decode.model_runner import forward, nothing
from mars_ray.decode.request import Request
from mars_ray.decode.scheduler import Work
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import MaskGroup, Plan
from mars_ray.model.card import ModelCard

_CONTEXT = 128  # tokens before the rows
# Most and least runs of a step: short steps vary most; one of two long ones may be disturbed.
_TIMES, _LEAST = 10, 2
_ENOUGH_S = 0.1
# The least share of a step's time that its rows take.
_LEAST_SHARE = 0.1


def measure_steps(backend: Backend, card: ModelCard, config: EngineConfig) -> StepCost:
    """The cost of steps, measured up to the most rows of the largest batch in `verified` with one
    group, and of one sequence with a group for every outcome.

    Overwrites the first pages of the cache.
    """
    depth = max(1, card.block_size)
    widest = 1 + 2 * depth
    most = max(config.max_batch * widest, 1 + depth + (depth + 1) * depth)
    most = min(config.step_tokens, most)

    def seconds(rows: int, sequences: int) -> float:
        return _least_seconds(backend, card, config, rows, sequences)

    batch = min(config.max_batch, most)
    sequence_s, few = 0.0, -(-batch // widest)
    if batch > few:
        # Alternately, so that a disturbance affects both.
        pairs = [(seconds(batch, batch), seconds(batch, few)) for _ in range(2)]
        many_s, few_s = map(min, zip(*pairs, strict=True))
        sequence_s = max(0.0, (many_s - few_s) / (batch - few))
    seconds_at = {}
    for rows in row_counts(most):
        sequences = min(batch, -(-rows // widest))
        total_s = seconds(rows, sequences)
        seconds_at[rows] = max(_LEAST_SHARE * total_s, total_s - sequence_s * sequences)
    return StepCost(seconds_at, sequence_s)


def _least_seconds(
    backend: Backend, card: ModelCard, config: EngineConfig, rows: int, sequences: int
) -> float:
    """Least seconds of several such steps, not counting the first."""
    step_seconds(backend, card, config, rows, sequences)
    times: list[float] = []
    while len(times) < _TIMES and (len(times) < _LEAST or sum(times) < _ENOUGH_S):
        times.append(step_seconds(backend, card, config, rows, sequences))
    return min(times)


def step_seconds(
    backend: Backend, card: ModelCard, config: EngineConfig, rows: int, sequences: int
) -> float:
    """Seconds of a step of `rows`, spread evenly over sequences that share all pages."""
    work = list(_work(rows, sequences, card.block_size, config))
    if backend.runner.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    reader = forward(backend, work, card.mask_token_id)
    read = reader.rows(nothing)
    outcomes = [len(item.plan.drafts) if item.plan else 0 for item in work]
    # This ends with a copy to the host.
    reader.proposals(outcomes, [own.best[-1] for own in read])
    return time.perf_counter() - started


def _work(rows: int, sequences: int, depth: int, config: EngineConfig) -> Iterator[Work]:
    start = min(_CONTEXT, config.max_context // 2)
    for index in range(sequences):
        width = len(range(index, rows, sequences))
        pages = list(range(-(-(start + width) // config.page_size)))
        request = Request(str(index), (0,), ExactMode(), Sampling(), start + width, frozenset())
        sequence = Sequence(request, 0, [0] * (start + 1), cached=start, pages=pages)
        yield Work(sequence, 1, _plan(width - 1, depth))


def _plan(rows: int, depth: int) -> Plan:
    """A typical plan: more masks than drafts, behind successive outcomes."""
    masks = 2 * rows // 3 if depth else 0
    drafts = rows - masks
    groups = tuple(
        MaskGroup(max(0, drafts - index), min(depth, masks - start))
        for index, start in enumerate(range(0, masks, max(1, depth)))
    )
    return Plan([0] * drafts, groups, ("ratio",))
