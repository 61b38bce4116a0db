"""Work before traffic comes: run every kernel once, and measure the cost of steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import MOST_NGRAM_DRAFTS, ExactMode
from mars_ray.core.step_cost import CONTEXT, StepCost, row_counts
from mars_ray.decode.attention.backend import Backend
from mars_ray.decode.model_runner import forward
from mars_ray.decode.request import Request
from mars_ray.decode.scheduler import Work
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.stats import prompt_pairs
from mars_ray.decode.strategies import MaskGroup, Plan
from mars_ray.model.directory import ModelCard

# Tokens before the rows where the cost of context is measured: the more, the clearer it is.
_LONG_CONTEXT = 512
# Rows of a prompt where the cost of its attention is measured.
_CHUNK = 128
# Most rows of a prompt that are measured at once, since a cold start should be short.
_MOST_PROMPT = 512
# Most and least runs of a step: short steps vary most; one of two long ones may be disturbed.
_TIMES, _LEAST = 10, 2
_ENOUGH_S = 0.1
_LONG_S = 0.5  # what a first run does once is little beside it, and a cold start should be short
# The least share of a step's time that its rows take.
_LEAST_SHARE = 0.1

Clock = Callable[[], float]  # seconds


@dataclass(frozen=True, slots=True)
class StepTimer:
    """Times steps of an idle engine; they overwrite its cache."""

    backend: Backend
    card: ModelCard
    config: EngineConfig
    clock: Clock = time.perf_counter

    def least(self, work: Callable[[], list[Work]]) -> float:
        """Least seconds of several such steps, not counting the first unless it is long."""
        first_s = self.seconds(work())
        times = [first_s] if first_s > _LONG_S else []
        while len(times) < _TIMES and (len(times) < _LEAST or sum(times) < _ENOUGH_S):
            times.append(self.seconds(work()))
        return min(times)

    def seconds(self, work: list[Work]) -> float:
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize()
        started = self.clock()
        reader = forward(self.backend, work, self.card.mask_token_id)
        read = reader.rows(lambda: None)
        outcomes = [len(item.plan.drafts) for item in work if item.plan]
        # This ends with a copy to the host.
        reader.proposals(outcomes, [own.best[-1] for own in read])
        return self.clock() - started

    def decoding(
        self, rows: int, sequences: int, context: int = CONTEXT, *, masks: bool = False
    ) -> list[Work]:
        """A step of `rows`, spread evenly over sequences with so many tokens in the cache in the
        mean: from hardly any to twice as many, as lengths differ in traffic, since a backend may
        pad all to the longest. Rows are drafts, or with `masks` two in three are masks."""
        depth = self.card.block_size if masks else 0
        sizes = [2 * context * index // (2 * sequences) for index in range(1, 2 * sequences, 2)]
        plans = [_plan(width - 1, depth) for width in _spread(rows, sequences)]
        return self._work([(size, 1, plan) for size, plan in zip(sizes, plans, strict=True)])

    def prompt(self, rows: int, context: int = 0) -> list[Work]:
        """A step of a prompt's `rows`, of which so many tokens are in the cache; of several prompts
        if one cannot be so long."""
        pieces = _spread(rows, -(-rows // (self.config.context - context)))
        return self._work([(context, width, None) for width in pieces])

    def _work(self, items: list[tuple[int, int, Plan | None]]) -> list[Work]:
        """The work of sequences with so many cached tokens, pending ones, and a plan."""
        work, first, count = [], 0, len(self.backend.cache.pages[0])
        for index, (cached, pending, plan) in enumerate(items):
            rows = pending + (plan.rows if plan else 0)
            tokens = [0] * (cached + pending)
            mode, limit = ExactMode(), len(tokens)
            request = Request(str(index), (0,), mode, Sampling(), limit, frozenset())
            # No page is shared: one that is read again would come from the processor's cache.
            behind = first + -(-(cached + rows) // self.config.page_size)
            pages = [page % count for page in range(first, behind)]
            first = behind
            work.append(
                Work(Sequence(request, 0, tokens, cached=cached, pages=pages), pending, plan)
            )
        return work


def measure_steps(timer: StepTimer) -> StepCost:
    """The cost of steps, measured up to the most rows of the largest batch in `verified` with one
    group, and of one sequence with a group for every outcome; and of a prompt that fills a step, or
    a part of a large one."""
    config, depth = timer.config, max(1, timer.card.block_size)
    widest = 1 + 2 * depth
    most = max(config.max_batch * widest, 1 + depth + (depth + 1) * depth, 1 + MOST_NGRAM_DRAFTS)
    most = min(config.step_tokens, most)
    context, long = (min(n, config.context // 2) for n in (CONTEXT, _LONG_CONTEXT))

    def seconds(rows: int, sequences: int, context: int = context) -> float:
        return timer.least(lambda: timer.decoding(rows, sequences, context))

    def prompt_s(rows: int, context: int) -> float:
        return timer.least(lambda: timer.prompt(rows, context))

    batch = min(config.max_batch, most)
    few, chunk = -(-batch // widest), min(_CHUNK, config.step_tokens, long)
    cache_token_s = _slope(lambda n: seconds(batch, batch, n), context, long) / batch
    # Each comes with its context.
    sequence_s = _slope(lambda n: seconds(batch, n), few, batch) - cache_token_s * context
    sequence_s = max(0.0, sequence_s)
    # A prompt's cached tokens are read once, too.
    token_s = _slope(lambda n: prompt_s(chunk, n), 0, long)
    prompt_attention_s = max(0.0, token_s - cache_token_s) / chunk
    seconds_at = {}
    for rows in row_counts(most):
        sequences = min(batch, -(-rows // widest))
        total_s = seconds(rows, sequences)
        own_s = sequences * (sequence_s + cache_token_s * context)
        seconds_at[rows] = max(_LEAST_SHARE * total_s, total_s - own_s)
    first_mask_s, mask_s = _mask_seconds(timer, most, context) if timer.card.block_size else (0, 0)
    rows = min(config.step_tokens, _MOST_PROMPT, config.max_batch * config.context)
    if rows >= 2 * most:
        # Linear between the two; a few rows less or more would measure how prompts' rows differ.
        work = timer.prompt(rows)
        own_s = len(work) * sequence_s + prompt_pairs(work) * prompt_attention_s
        seconds_at[rows] = max(seconds_at[most], prompt_s(rows, 0) - own_s)
    return StepCost(seconds_at, sequence_s, cache_token_s, prompt_attention_s, first_mask_s, mask_s)


def _mask_seconds(timer: StepTimer, most: int, context: int) -> tuple[float, float]:
    """Seconds that a step's first mask takes more than a draft in its place, and every mask."""
    widest = 1 + 2 * timer.card.block_size
    found = []
    for rows in (min(widest, most), most):
        sequences = min(timer.config.max_batch, -(-rows // widest))

        def seconds(*, masks: bool, shape: tuple[int, int] = (rows, sequences)) -> float:
            return timer.least(lambda: timer.decoding(*shape, context, masks=masks))

        # Alternately, so that a disturbance affects both.
        pairs = [(seconds(masks=True), seconds(masks=False)) for _ in range(2)]
        with_s, without_s = map(min, zip(*pairs, strict=True))
        work = timer.decoding(rows, sequences, context, masks=True)
        found.append((sum(item.masks for item in work), max(0.0, with_s - without_s)))
    (few, few_s), (many, many_s) = found
    mask_s = max(0.0, many_s - few_s) / (many - few) if many > few else 0.0
    return max(0.0, few_s - mask_s * few), mask_s


def _slope(seconds: Callable[[int], float], few: int, many: int) -> float:
    """Seconds that each more takes, at least 0."""
    if many <= few:
        return 0.0
    # Alternately, so that a disturbance affects both.
    pairs = [(seconds(many), seconds(few)) for _ in range(2)]
    many_s, few_s = map(min, zip(*pairs, strict=True))
    return max(0.0, (many_s - few_s) / (many - few))


def _spread(rows: int, parts: int) -> list[int]:
    """The rows in parts that differ by at most one."""
    return [len(range(index, rows, parts)) for index in range(parts)]


def _plan(rows: int, depth: int) -> Plan:
    """A typical plan: more masks than drafts, behind successive outcomes."""
    masks = 2 * rows // 3 if depth else 0
    drafts = rows - masks
    groups = tuple(
        MaskGroup(max(0, drafts - index), min(depth, masks - start))
        for index, start in enumerate(range(0, masks, max(1, depth)))
    )
    return Plan([0] * drafts, groups, ("ratio",))
