"""What a replica counts of answers, and what it says of them and its engine.

The engine's own counts come as one `Snapshot` (`decode/stats.py`), which goes three ways:

metrics.py        to Prometheus, as `AnswerStats` do, of each answer at its end
Live.status       with the last minute's steps to the page and `GET /v1/mars/status`
to_metrics        with the sums of a `Tally` to the autoscaling policy (`autoscale/sample.py`)
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mars_ray.autoscale.sample import PINNED, ReplicaCounts
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.config.serve import ServeJob
from mars_ray.decode.stats import THRESHOLDS, Snapshot
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


class Observer(Protocol):
    """Is told of every answer."""

    def answer(self, seen: AnswerStats) -> None:
        """At its end, whatever that was."""
        ...


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

    def status(self, job: ServeJob, seen: Snapshot, now: float) -> ReplicaStatus:
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
    quality_class: Counter[str] = field(default_factory=Counter)

    def offered(self, call: GenerationRequest, *, refused: bool = False) -> None:
        """A call that has come, whatever becomes of it."""
        # Classes of what is refused count, too: shares of the rest would tell what shedding does
        # to the traffic, and not what the traffic is.
        self.quality_class[call.quality_class or PINNED] += call.choices
        if refused:
            self.refused += call.choices

    def ended(self, seen: AnswerStats) -> None:
        """An answer, however it ended."""
        self.finished += 1
        self.output_tokens += seen.completion_tokens


def to_metrics(seen: Snapshot, tally: Tally) -> dict[str, float]:
    """What Ray Serve carries to the autoscaling policy."""
    totals, verified = seen.totals, seen.by_mode.get(_VERIFIED)
    of_mode: dict[str, Any] = {}
    if verified and verified.forwards:
        tokens_at = dict(zip(THRESHOLDS, verified.tokens_at, strict=True))
        of_mode = {"verified_forwards": verified.forwards, "tokens_at": tokens_at}
    return ReplicaCounts(
        running=seen.running,
        waiting=seen.waiting,
        threshold=seen.set_point,
        step_cost=seen.step_cost,
        arrived=tally.quality_class.total() - tally.refused,
        refused=tally.refused,
        finished=tally.finished,
        output_tokens=tally.output_tokens,
        quality_class=dict(tally.quality_class),
        prompts=totals.prompts,
        prompt_tokens=totals.prompt_tokens,
        steps=totals.steps,
        step_s=totals.seconds,
        sequences=totals.sequences,
        decode_rows=totals.decode_rows,
        prompt_steps=totals.prompt_steps,
        prompt_rows=totals.prompt_rows,
        **of_mode,
    ).to_metrics()
