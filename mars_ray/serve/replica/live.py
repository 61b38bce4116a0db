"""What an engine has been doing lately, for the page and `GET /v1/mars/status`."""

from collections import deque
from dataclasses import dataclass

from mars_ray.config.modes import ExactMode, Mode
from mars_ray.config.serve import ServeJob
from mars_ray.serve.openai.responses import threshold_of
from mars_ray.serve.replica.stats import EngineStats
from mars_ray.serve.status import ReplicaStatus

_BUCKET_S = 0.5
_RATE_S = 5.0
# Shares are of so long a time: of a few seconds they would jump with every answer.
_SHARE_S = 60.0


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
