"""Kubernetes' horizontal pod autoscaler (HPA): what becomes of a wish for replicas.

Rules and defaults of kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale, "Algorithm
details" and "Configurable scaling behavior". It looks every 15 s.
"""

import math
from collections import deque
from dataclasses import dataclass, field

SYNC_S = 15.0
_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How fast a fleet may change: `behavior` of an HPA. The defaults are Kubernetes'.

    In one period the fleet grows by `up_pods` or by `up_share` of itself, whichever is more. The
    lowest wish of `up_stable_s` counts, and the highest of `down_stable_s`.
    """

    up_stable_s: float = 0.0
    up_pods: int = 4
    up_share: float = 1.0
    up_period_s: float = 15.0
    down_stable_s: float = 300.0
    down_pods: int | None = None  # None: all
    down_period_s: float = 15.0


def average_value(value: float, target: float, replicas: int) -> int:
    """The wish for a metric of type AverageValue: the whole fleet's value over the target of one
    replica. Within the tolerance nothing changes."""
    if replicas and abs(value / (target * replicas) - 1) <= _TOLERANCE:
        return replicas
    return math.ceil(value / target - 1e-9)


@dataclass(slots=True)
class PodAutoscaler:
    """The HPA of one fleet, between `low` and `high` replicas."""

    behaviour: Behaviour
    low: int
    high: int
    _synced_s: float = -math.inf
    _wishes: deque[tuple[float, int]] = field(default_factory=deque)
    _targets: deque[tuple[float, int]] = field(default_factory=deque)

    def due(self, now: float) -> bool:
        """Whether it looks again now."""
        return now - self._synced_s >= SYNC_S

    def scaled(self, wish: int, target: int, now: float) -> int:
        """The new target, by the stabilisation windows and rate limits."""
        rules = self.behaviour
        self._synced_s = now
        if not self._wishes:
            self._wishes.append((now, target))
        self._wishes.append((now, min(max(wish, self.low), self.high)))
        self._targets.append((now, target))
        oldest = max(rules.up_stable_s, rules.down_stable_s, rules.up_period_s, rules.down_period_s)
        for past in (self._wishes, self._targets):
            while past[0][0] < now - oldest:
                past.popleft()
        newest = self._wishes[-1][1]
        least = min([newest, *_since(self._wishes, now - rules.up_stable_s)])
        most = max([newest, *_since(self._wishes, now - rules.down_stable_s)])
        if least > target:
            before = min(_since(self._targets, now - rules.up_period_s))
            more = max(rules.up_pods, math.ceil(before * rules.up_share))
            return min(least, max(target, before + more))
        if most < target:
            before = max(_since(self._targets, now - rules.down_period_s))
            fewer = 0 if rules.down_pods is None else before - rules.down_pods
            return max(most, min(target, fewer))
        return min(max(target, self.low), self.high)


def _since(past: deque[tuple[float, int]], start_s: float) -> list[int]:
    """The values after a moment."""
    return [value for at, value in past if at > start_s]
