"""Knative's pod autoscaler (KPA): stable and panic mode on concurrency.

Rules and defaults of knative.dev/docs/serving/autoscaling/kpa-specific and .../concurrency: stable
window 60 s, panic window 10% of it, panic at 200% of what is ready, scale up at most 1000 times and
down at most by half at once; no scale-down in panic mode, which lasts until a stable window has
passed without cause for panic. It decides every two seconds.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from mars_ray.autoscale.policy import Decision, State
from mars_ray.autoscale.sample import Sample
from mars_ray.simulator.cases import ongoing

# Its container-concurrency-target-default, and container-concurrency-target-percentage of that.
TARGET = 100.0 * 0.7
_STABLE_S, _PANIC_S, _TICK_S = 60.0, 6.0, 2.0
_PANIC_AT, _MOST_UP, _MOST_DOWN = 2.0, 1000.0, 2.0


@dataclass(slots=True)
class Knative:
    """Knative's policy, for `target` concurrent requests a replica."""

    target: float
    low: int
    high: int
    _seen: deque[tuple[float, float]] = field(default_factory=deque)
    _panic_since: float | None = None
    _panic_most: int = 0
    _decided_s: float = -math.inf

    def __call__(self, sample: Sample, now: float) -> Decision:
        """Decide by the mean concurrency of both windows."""
        self._seen.append((now, ongoing(sample)))
        while self._seen[0][0] < now - _STABLE_S:
            self._seen.popleft()
        if now - self._decided_s < _TICK_S:
            return self._decision(sample.target)
        self._decided_s = now
        ready = max(1, sample.running)
        stable, panic = (self._wanted(now - span, ready) for span in (_STABLE_S, _PANIC_S))
        if panic / ready >= _PANIC_AT:
            self._panic_since = now
        elif self._panic_since is not None and now - self._panic_since > _STABLE_S:
            self._panic_since, self._panic_most = None, 0
        if self._panic_since is None:
            return self._decision(stable)
        self._panic_most = max(self._panic_most, panic, stable, sample.running)
        return self._decision(self._panic_most)

    def _wanted(self, since: float, ready: int) -> int:
        values = [value for at, value in self._seen if at >= since]
        wanted = math.ceil(sum(values) / len(values) / self.target)
        return min(max(wanted, math.floor(ready / _MOST_DOWN)), math.ceil(ready * _MOST_UP))

    def _decision(self, replicas: int) -> Decision:
        replicas = min(max(replicas, self.low), self.high)
        mode = "stable" if self._panic_since is None else "panic"
        return Decision(replicas, 1.0, 0.0, mode, State())
