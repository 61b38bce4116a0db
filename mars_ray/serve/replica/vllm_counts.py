"""Counts of a vLLM engine since its start, as a `Snapshot` has them.

vLLM's scheduler reports each step: what it held, and when it ended. Its tokens come by request, so
tokens of a request are counted whether somebody still waits for them or not. What steps cost is
measured with a few timed answers before traffic comes: vLLM itself runs every kernel when it
starts, and steps cannot be asked of it one by one.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.core.step_cost import StepCost, row_counts
from mars_ray.decode.info import EngineInfo
from mars_ray.decode.request import EngineFacts, Request
from mars_ray.decode.stats import ModeMeasures, Snapshot, StepTotals

# Tokens of an answer, and so steps of each batch size that are timed.
_TOKENS = 8
# Tokens of its prompt; more would make a cold start with large batches long.
_PROMPT = 32
# Most rows of a prompt that are measured at once, as a cold start should be short.
_MOST_PROMPT = 512
# Steps of a prompt that are timed.
_PROMPTS = 3


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A step's rows, and how long it took."""

    prompt_rows: int
    sequences: int  # decoding ones
    decode_rows: int
    seconds: float

    @property
    def rows(self) -> int:
        """All rows of the step."""
        return self.prompt_rows + self.decode_rows


class VllmCounts:
    """Fed with every report of the engine, and every step of every request."""

    def __init__(self, step_tokens: int, cost: StepCost | None = None) -> None:
        """`step_tokens` is the most rows of a step; the steps correct a cost that was measured."""
        self._step_tokens = step_tokens
        self._cost = cost
        self._totals = StepTotals()
        self._preemptions = 0
        self._prefix_queries = self._prefix_hits = 0
        self._last = SchedulerStats()
        self._last_s: float | None = None  # end of the last step of an engine that is still at work
        self._discarded = 0
        self._by_mode: dict[str, ModeMeasures] = {}
        # By mode: counts of steps by the number of tokens that they committed beyond the first.
        self._beyond: dict[str, Counter[int]] = {}

    def begin(self, now: float) -> None:
        """An idle engine gets work."""
        self._last_s = now

    def idle(self) -> None:
        """The engine has no work left: the time until the next step is nobody's."""
        self._last_s = None
        self._last = replace(self._last, num_running_reqs=0, kv_cache_usage=0.0)

    def step(self, outputs: EngineCoreOutputs) -> StepSeen | None:
        """Counts a report, and returns what it tells of a step that was timed."""
        stats = outputs.scheduler_stats
        if stats is None:
            return None
        self._last = stats
        self._prefix_queries += stats.prefix_cache_stats.queries
        self._prefix_hits += stats.prefix_cache_stats.hits
        details, begin_s = stats.iteration_details, self._last_s
        if details is None or details.is_dummy or begin_s is None:
            return None
        self._last_s = outputs.timestamp
        seen = StepSeen(
            prompt_rows=details.num_ctx_tokens,
            sequences=details.num_generation_requests,
            decode_rows=details.num_generation_tokens,
            seconds=max(0.0, outputs.timestamp - begin_s),
        )
        self._add(seen)
        return seen

    def _add(self, seen: StepSeen) -> None:
        totals = self._totals
        totals.steps += 1
        totals.seconds += seen.seconds
        totals.prompt_steps += seen.prompt_rows > 0
        totals.prompt_rows += seen.prompt_rows
        totals.sequences += seen.sequences
        totals.decode_rows += seen.decode_rows
        if self._cost:
            self._cost.observe(seen.rows, seen.seconds)

    def prompt(self, computed_tokens: int) -> None:
        """Counts a prompt whose answer has begun."""
        self._totals.prompts += 1
        self._totals.prompt_tokens += computed_tokens

    def discard(self, tokens: int) -> None:
        """Counts tokens that nobody has read."""
        self._discarded += tokens

    def preempted(self) -> None:
        """Counts a request that was sent back to wait."""
        self._preemptions += 1

    def forward(self, mode: str, tokens: int, threshold: float | None) -> None:
        """Counts a request's step; with a threshold, one that verifies drafts by it."""
        self._totals.output_tokens += tokens
        if tokens > 1:
            self._beyond.setdefault(mode, Counter())[tokens - 1] += 1
        if threshold is not None:
            measures = self._by_mode.setdefault(mode, ModeMeasures())
            # vLLM does not say by how much a draft passed, only at which threshold.
            measures.add_step([threshold] * (tokens - 1))

    def snapshot(
        self,
        info: EngineInfo,
        open_requests: int,
        set_point: float,
        windows: Sequence[int],
        adapter: str | None,
    ) -> Snapshot:
        """The engine's state and counts so far; `open_requests` wait or run."""
        # vLLM's number is that of the last step.
        running = min(open_requests, self._last.num_running_reqs)
        return Snapshot(
            info=info,
            running=running,
            waiting=open_requests - running,
            cache_share=self._last.kv_cache_usage,
            preemptions=self._preemptions,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            windows=tuple(windows[:running]),
            adapter=adapter,
            set_point=set_point,
            step_tokens=self._step_tokens,
            step_cost=self._cost.table() if self._cost else {},
            totals=replace(self._totals),
            discarded_tokens=self._discarded,
            by_mode=deepcopy(self._by_mode),
            accepted_at={mode: _accepted_at(steps) for mode, steps in self._beyond.items()},
        )


def _accepted_at(steps: Counter[int]) -> list[int]:
    """Tokens that steps committed at each place after their first."""
    return [sum(n for count, n in steps.items() if count > at) for at in range(max(steps))]


def loads(facts: EngineFacts, step_tokens: int) -> Iterator[list[Request]]:
    """Requests to run together, one list after another: batches of every size that is measured,
    and prompts that fill a step alone."""
    tokens = min(_TOKENS, facts.max_context - 1)
    for sequences in row_counts(facts.max_batch):
        if sequences <= facts.max_batch:
            length = min(_PROMPT, facts.max_context - tokens)
            yield [_request(f"{sequences}-{n}", length, tokens, facts) for n in range(sequences)]
    for number in range(_PROMPTS):
        length = min(_MOST_PROMPT, step_tokens, facts.max_context - 1)
        yield [_request(f"prompt-{number}", length, 1, facts)]


def step_cost(seen: Iterable[StepSeen]) -> StepCost:
    """The least seconds of steps of so many rows: of decoding sequences alone, or of one prompt."""
    least: dict[int, float] = {}
    for step in seen:
        if step.prompt_rows == 0 or step.sequences == 0:
            least[step.rows] = min(step.seconds, least.get(step.rows, step.seconds))
    return StepCost(least)


def _request(name: str, length: int, tokens: int, facts: EngineFacts) -> Request:
    """A prompt that no other begins with, so that none is found in the prefix cache."""
    chosen = random.Random(name)
    prompt = tuple(chosen.randrange(facts.vocabulary) for _ in range(length))
    name = f"warm-up-{name}"
    return Request(name, prompt, ExactMode(), Sampling(), tokens, frozenset())
