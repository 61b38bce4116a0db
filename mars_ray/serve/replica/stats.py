"""What a replica counts: of answers and its engine, of the last minute, and for the policy.

AnswerStats, EngineStats   plain values, which `metrics.py` here exports
Live                       the last minute, for the page and `GET /v1/mars/status`
Tally                      sums since the start, for the policy (`autoscale/collect.py`)
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mars_ray.autoscale import collect
from mars_ray.autoscale.sample import PINNED
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.config.serve import ServeJob
from mars_ray.decode.engine import Engine
from mars_ray.decode.info import EngineInfo
from mars_ray.serve.openai.responses import threshold_of
from mars_ray.serve.protocol import GenerationRequest
from mars_ray.serve.status import ReplicaStatus

Ending = Literal["stop", "length", "tool_calls", "abort", "error", "deadline", "refused"]
_BUCKET_S = 0.5
_RATE_S = 5.0
# Shares are of so long a time: of a few seconds they would jump with every answer.
_SHARE_S = 60.0
_VERIFIED = VerifiedMode().type


@dataclass(slots=True)
class AnswerStats:
    """One answer from its submission to its end; times in seconds."""

    mode: str
    prompt_tokens: int
    ending: Ending = "abort"
    completion_tokens: int = 0
    forwards: int = 0
    disagreed: int = 0
    degraded: bool = False  # a threshold below the service's set-point at rest was in force
    queue_s: float | None = None  # until its first rows were forwarded
    first_token_s: float | None = None
    total_s: float = 0.0
    # Between two steps of it, and how many tokens the later one brought.
    gaps: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine between two steps. Counts are since its start."""

    running: int
    waiting: int
    cache_share: float  # of the pages, those that sequences hold
    preemptions: int
    prefix_queries: int  # tokens of admitted sequences
    prefix_hits: int  # those of them that were in the cache
    windows: tuple[int, ...]  # of the sequences in the batch
    adapter: str | None  # the draft adapter in force
    can_draft: bool  # by it, or by the model itself
    set_point: float  # threshold of requests that pin none, as far as they tolerate it
    # By mode: checked tokens; T/F that each threshold would have given.
    checked: dict[str, int]
    tokens_per_forward_at: dict[str, dict[float, float]]
    accepted_at: dict[str, list[int]]  # by place beyond the first
    info: EngineInfo


class Observer(Protocol):
    """Is told of every answer."""

    def answer(self, seen: AnswerStats) -> None:
        """At its end, whatever that was."""
        ...


def engine_stats(engine: Engine) -> EngineStats:
    """For the engine's own thread."""
    by_mode = engine.measures.by_mode
    return EngineStats(
        running=engine.running,
        waiting=engine.waiting,
        cache_share=engine.pool.in_use / engine.pool.count,
        preemptions=engine.preemptions,
        prefix_queries=engine.prefix_queries,
        prefix_hits=engine.prefix_hits,
        windows=engine.windows,
        adapter=engine.adapter_name,
        can_draft=engine.card.block_size > 0,
        set_point=engine.thresholds.set_point,
        checked={mode: measures.checked for mode, measures in by_mode.items()},
        tokens_per_forward_at={
            mode: measures.tokens_per_forward() for mode, measures in by_mode.items()
        },
        accepted_at=engine.measures.accepted_at,
        info=engine.info,
    )


@dataclass(slots=True)
class _Bucket:
    begin_s: float
    tokens: int = 0
    forwards: int = 0
    disagreed: int = 0


class Live:
    """Counts what steps commit, by half seconds, and forgets them after a minute."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()

    def add(self, now: float, tokens: int, forwards: int, disagreed: int) -> None:
        """Steps of one sequence have committed tokens, and seen earlier ones to disagree."""
        if not self._buckets or now - self._buckets[-1].begin_s >= _BUCKET_S:
            self._forget(now)
            self._buckets.append(_Bucket(now))
        bucket = self._buckets[-1]
        bucket.tokens += tokens
        bucket.forwards += forwards
        bucket.disagreed += disagreed

    def tokens_per_second(self, now: float) -> float:
        """Over the last seconds, or since the first token if that is later."""
        recent = [bucket for bucket in self._buckets if now - bucket.begin_s < _RATE_S]
        if not recent:
            return 0.0
        seconds = max(_BUCKET_S, now - recent[0].begin_s)
        return sum(bucket.tokens for bucket in recent) / seconds

    def status(self, job: ServeJob, seen: EngineStats, now: float) -> ReplicaStatus:
        """With the last minute's counts, and the threshold of a request that pins none."""
        self._forget(now)
        mode = job.mode
        if mode.needs_masks and not seen.can_draft:
            mode = ExactMode()
        return ReplicaStatus(
            mode=mode.type,
            threshold=_in_force(mode, job, seen.set_point),
            adapter=seen.adapter,
            running=seen.running,
            waiting=seen.waiting,
            cache_share=seen.cache_share,
            tokens_per_second=self.tokens_per_second(now),
            tokens=sum(bucket.tokens for bucket in self._buckets),
            forwards=sum(bucket.forwards for bucket in self._buckets),
            disagreed=sum(bucket.disagreed for bucket in self._buckets),
            engine=seen.info,
        )

    def _forget(self, now: float) -> None:
        while self._buckets and now - self._buckets[0].begin_s >= _SHARE_S:
            self._buckets.popleft()


def _in_force(mode: Mode, job: ServeJob, set_point: float) -> float | None:
    if mode.verifies:
        return max(job.qualities[job.default_quality], set_point)
    return threshold_of(mode)


@dataclass(slots=True)
class Tally:
    """Of answers, since the start."""

    refused: int = 0
    finished: int = 0
    output_tokens: int = 0
    of_class: Counter[str] = field(default_factory=Counter)

    def offered(self, call: GenerationRequest, *, refused: bool = False) -> None:
        """A call that has come, whatever becomes of it."""
        # Classes of what is refused count, too: shares of the rest would tell what shedding does
        # to the traffic, and not what the traffic is.
        self.of_class[call.quality_class or PINNED] += call.choices
        if refused:
            self.refused += call.choices

    def ended(self, seen: AnswerStats) -> None:
        """An answer, however it ended."""
        self.finished += 1
        self.output_tokens += seen.completion_tokens

    def sums(self, engine: Engine) -> dict[str, float]:
        """With those of the engine; for the engine's own thread."""
        totals, measures = engine.totals, engine.measures.by_mode.get(_VERIFIED)
        sums: dict[str, float] = {
            collect.ARRIVED: self.of_class.total() - self.refused,
            collect.REFUSED: self.refused,
            collect.FINISHED: self.finished,
            collect.OUTPUT_TOKENS: self.output_tokens,
            collect.PROMPT_STEPS: totals.prompt_steps,
            collect.PROMPT_ROWS: totals.prompt_rows,
            collect.PROMPTS: totals.prompts,
            collect.PROMPT_TOKENS: totals.prompt_tokens,
            collect.STEPS: totals.steps,
            collect.STEP_S: totals.seconds,
            collect.SEQUENCES: totals.sequences,
            collect.DECODE_ROWS: totals.decode_rows,
            collect.RUNNING: engine.running,
            collect.WAITING: engine.waiting,
            collect.THRESHOLD: engine.thresholds.set_point,
        }
        sums |= {collect.OF_CLASS + name: count for name, count in self.of_class.items()}
        if engine.control:
            table = engine.control.cost.table(engine.config.max_batch)
            sums |= {f"{collect.STEP_COST}{rows}": seconds for rows, seconds in table.items()}
        if measures and measures.forwards:
            sums |= {collect.VERIFIED_FORWARDS: measures.forwards}
            curve = measures.tokens_per_forward()
            sums |= {
                f"{collect.TOKENS_AT}{threshold:g}": mean * measures.forwards
                for threshold, mean in curve.items()
            }
        return sums
