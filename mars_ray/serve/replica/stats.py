"""A replica's counts of answers, and its reports about them and its engine.

The engine's own counts come as one `Snapshot` (`decode/stats.py`), which is used in three places:

metrics.py        exports it to Prometheus, and the `AnswerStats` of each finished answer
Live.status       joins it with the last minute's steps for the page and `GET /v1/mars/status`
LLMServer.report  joins it with the sums of answers for the policy (`autoscale/sample.py`)
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from mars_ray.autoscale.sample import PINNED, SLOW
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import ServeJob
from mars_ray.core.thresholds import Elastic
from mars_ray.decode.request import TokenEvent
from mars_ray.decode.stats import Snapshot
from mars_ray.serve.protocol import GenerationRequest
from mars_ray.serve.status import ReplicaStatus

Ending = Literal["stop", "length", "tool_calls", "abort", "error", "deadline", "refused"]
_BUCKET_S = 0.5
_RATE_S = 5.0
# Window of shares: over a few seconds they would jump with every answer.
_SHARE_S = 60.0
# Endings that come from the service; of other answers nobody knows how fast they would have been.
_JUDGED = frozenset({"stop", "length", "tool_calls", "deadline"})


@dataclass(slots=True)
class AnswerStats:
    """One answer from its submission to its end; times in seconds."""

    mode: str
    prompt_tokens: int  # 0 for the second and later answers to a prompt
    quality_class: str = PINNED
    ending: Ending = "abort"
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt's
    forwards: int = 0
    disagreed: int = 0
    ngram_tokens: int = 0
    degraded: bool = False  # a threshold below the set-point at rest was in force
    queue_s: float | None = None  # time until its first rows were forwarded
    first_token_s: float | None = None
    total_s: float = 0.0
    # Of the last answer to its prompt to end: the tokens of the longest of these answers.
    longest_tokens: int | None = None
    # Time between two of its steps, and the number of tokens of the later one.
    gaps: list[tuple[float, int]] = field(default_factory=list)
    # The largest of its times so far as a share of the SLO's limit: above 1 it is late.
    strain: float = 0.0
    # Those of all answers to the same prompt, this one's too.
    siblings: list["AnswerStats"] = field(default_factory=list, repr=False, compare=False)
    begun_s: float = field(default_factory=time.monotonic)
    last_s: float = field(default_factory=time.monotonic)  # when steps last added to it
    is_over: bool = False

    @property
    def time_per_token_s(self) -> float:
        """Mean over the tokens after the first, once the answer is over."""
        if self.first_token_s is None or self.completion_tokens < 2:
            return 0.0
        return (self.total_s - self.first_token_s) / (self.completion_tokens - 1)


class Live:
    """Counts what steps commit in intervals of half a second, and forgets it after a minute."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[float, Counter[str]]] = deque()  # and when they begin

    def add(self, now: float, **counts: int) -> None:
        """Adds steps of one sequence: `tokens` committed, `forwards`, earlier tokens `disagreed`,
        and the `ngram_tokens` among the committed ones."""
        if not self._buckets or now - self._buckets[-1][0] >= _BUCKET_S:
            self._forget(now)
            self._buckets.append((now, Counter()))
        self._buckets[-1][1].update(counts)

    def tokens_per_second(self, now: float) -> float:
        """The rate over the last seconds, or since the first token if that is later."""
        recent = [(begin_s, sums) for begin_s, sums in self._buckets if now - begin_s < _RATE_S]
        if not recent:
            return 0.0
        return sum(sums["tokens"] for _, sums in recent) / max(_BUCKET_S, now - recent[0][0])

    def status(
        self, job: ServeJob, seen: Snapshot, now: float, *, in_default_mode: bool
    ) -> ReplicaStatus:
        """The status with the last minute's counts, and the threshold of requests that pin none."""
        self._forget(now)
        mode = job.mode if in_default_mode else ExactMode()
        threshold = mode.own_threshold
        if mode.is_elastic:
            threshold = max(job.qualities[job.default_quality], seen.set_point)
        sums = sum((sums for _, sums in self._buckets), Counter[str]())
        return ReplicaStatus(
            mode=mode.type,
            threshold=threshold,
            adapter=seen.adapter,
            running=seen.running,
            waiting=seen.waiting,
            cache_share=seen.cache_share,
            tokens_per_second=self.tokens_per_second(now),
            tokens=sums["tokens"],
            forwards=sums["forwards"],
            disagreed=sums["disagreed"],
            ngram_tokens=sums["ngram_tokens"],
            engine=seen.info,
            step_tokens=seen.step_tokens,
            set_point=seen.set_point,
        )

    def _forget(self, now: float) -> None:
        while self._buckets and now - self._buckets[0][0] >= _SHARE_S:
            self._buckets.popleft()


class ReplicaCounters:
    """All that a replica counts of its answers since its start."""

    def __init__(self, job: ServeJob, observe: Callable[[AnswerStats], None] | None = None) -> None:
        self.live = Live()
        self.refused = self.finished = self.output_tokens = 0
        self.discarded = 0  # tokens that the engine has written, and no answer has
        # Answers by class: offered, with a first token, and found slow or late, each once (`SLOW`).
        self.quality_class: Counter[str] = Counter()
        self.started: Counter[str] = Counter()
        self.slow: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self._slo, self._set_point = job.scaling.slo, job.set_point
        self._observe = observe

    def offered(self, request: GenerationRequest, *, refused: bool = False) -> None:
        """Counts an arrived request, whether it is answered or refused."""
        # Those refused count in the classes, too: shares of the rest would describe the effect of
        # shedding instead of the traffic.
        self.quality_class[request.quality_class or PINNED] += request.choices
        if refused:
            self.refused += request.choices

    def _judge(self, seen: AnswerStats, strain: float) -> None:
        """Counts an answer as slow or late if one of its times is, and none has been before."""
        before, seen.strain = seen.strain, max(seen.strain, strain)
        self.slow[seen.quality_class] += before <= SLOW < seen.strain
        self.late[seen.quality_class] += before <= 1 < seen.strain

    def step(
        self, request: GenerationRequest, seen: AnswerStats, event: TokenEvent, tokens: int
    ) -> None:
        """Counts steps of an answer with so many tokens, up to this event."""
        now = time.monotonic()
        gap_s, seen.last_s = now - seen.last_s, now
        forwards, disagreed = event.forward - seen.forwards, event.disagreed - seen.disagreed
        self.live.add(
            now,
            tokens=tokens,
            forwards=forwards,
            disagreed=disagreed,
            ngram_tokens=event.ngram_tokens - seen.ngram_tokens,
        )
        seen.forwards, seen.disagreed = event.forward, event.disagreed
        seen.ngram_tokens = event.ngram_tokens
        if seen.prompt_tokens:
            seen.cached_tokens = event.cached_tokens
        if seen.first_token_s is None:
            seen.first_token_s, seen.queue_s = gap_s, event.queue_s
            self.started[seen.quality_class] += 1
            self._judge(seen, gap_s / self._slo.ttft_s)
        elif tokens:
            seen.gaps.append((gap_s, tokens))
        if isinstance(request.quality, Elastic) and event.threshold is not None:
            seen.degraded = event.threshold < max(request.quality.floor, self._set_point)

    def ended(self, seen: AnswerStats, ending: Ending) -> None:
        """Counts an answer at its end, whatever the ending."""
        seen.ending, seen.is_over = ending, True
        seen.total_s = time.monotonic() - seen.begun_s
        if all(sibling.is_over for sibling in seen.siblings):
            tokens = (sibling.completion_tokens for sibling in seen.siblings)
            seen.longest_tokens = max(tokens, default=None)
        if ending != "refused":
            self.finished += 1
            self.output_tokens += seen.completion_tokens
        if ending in _JUDGED:
            if seen.first_token_s is None:
                self._judge(seen, seen.total_s / self._slo.ttft_s)
            self._judge(seen, seen.time_per_token_s / self._slo.time_per_token_s)
        if self._observe:
            self._observe(seen)


def count_tokens(events: Iterable[TokenEvent]) -> int:
    return sum(len(event.tokens) for event in events)
