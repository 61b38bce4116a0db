"""What a service is doing at the moment, for its page and `GET /v1/mars/status`."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_BUCKET_S = 0.5
_RATE_S = 5.0
# Shares are of so long a time: of a few seconds they would jump with every answer.
_SHARE_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica now; tokens, forwards and disagreements are those of the last minute."""

    mode: str  # of a request that names none
    threshold: float | None
    running: int
    waiting: int
    cache_share: float
    tokens_per_second: float
    tokens: int
    forwards: int
    disagreed: int


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

    def add(self, now: float, tokens: int, disagreed: int) -> None:
        """A step of one sequence has committed tokens, and seen earlier ones to disagree."""
        if not self._buckets or now - self._buckets[-1].begin_s >= _BUCKET_S:
            self._forget(now)
            self._buckets.append(_Bucket(now))
        bucket = self._buckets[-1]
        bucket.tokens += tokens
        bucket.forwards += tokens > 0
        bucket.disagreed += disagreed

    def tokens_per_second(self, now: float) -> float:
        """Over the last seconds, or since the first token if that is later."""
        recent = [bucket for bucket in self._buckets if now - bucket.begin_s < _RATE_S]
        if not recent:
            return 0.0
        seconds = max(_BUCKET_S, now - recent[0].begin_s)
        return sum(bucket.tokens for bucket in recent) / seconds

    def last_minute(self, now: float) -> tuple[int, int, int]:
        """Tokens, forwards and disagreements."""
        self._forget(now)
        return (
            sum(bucket.tokens for bucket in self._buckets),
            sum(bucket.forwards for bucket in self._buckets),
            sum(bucket.disagreed for bucket in self._buckets),
        )

    def _forget(self, now: float) -> None:
        while self._buckets and now - self._buckets[0].begin_s >= _SHARE_S:
            self._buckets.popleft()


def model_status(name: str, replicas: Sequence[ReplicaStatus]) -> dict[str, Any]:
    """One model's entry in the reply, from the replicas that have answered."""
    tokens = sum(replica.tokens for replica in replicas)
    forwards = sum(replica.forwards for replica in replicas)
    disagreed = sum(replica.disagreed for replica in replicas)
    thresholds = [replica.threshold for replica in replicas if replica.threshold is not None]
    usage = [replica.cache_share for replica in replicas]
    return {
        "id": name,
        "replicas": len(replicas),
        "running": sum(replica.running for replica in replicas),
        "waiting": sum(replica.waiting for replica in replicas),
        "kv_cache_usage": sum(usage) / len(usage) if usage else None,
        "tokens_per_second": sum(replica.tokens_per_second for replica in replicas),
        "tokens_per_forward": tokens / forwards if forwards else None,
        "disagreement": disagreed / tokens if tokens else None,
        "mode": replicas[0].mode if replicas else None,
        # While a new one spreads, the lower one is what a client may get.
        "threshold": min(thresholds, default=None),
    }
