"""llm-d's SLO law: replicas by the p90 of latencies over their objectives.

The source is github.com/llm-d/llm-d-autoscaling, docs/developer-guide/epp-saturation-benchmark.md,
"control-law model", with its defaults and its HPA's (the configuration that reached 95.8% at 5.93
replicas). llm-d takes the p90 of predicted latencies; here it is that of measured ones, as if the
predictor were perfect about the present.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from mars_ray.autoscale.sample import Sample
from mars_ray.autoscale.state import Decision, State
from mars_ray.config.scaling import Slo
from mars_ray.simulator.engine.observe import Observed

_UP, _DOWN, _ALPHA, _CAP = 0.55, 0.40, 0.6, 2.0
_RECONCILE_S, _SYNC_S = 60.0, 15.0
_STABLE_UP_S, _STABLE_DOWN_S = 30.0, 180.0
_UP_PODS, _UP_PERIOD_S, _DOWN_PODS, _DOWN_PERIOD_S = 4, 60.0, 1, 120.0


@dataclass(slots=True)
class LlmD:
    """llm-d's policy for an SLO times `tightness`: below 1 it reacts as if less were allowed."""

    slo: Slo
    tightness: float
    low: int
    high: int
    _smooth: float = 0.0
    _wanted: int | None = None
    _reconciled_s: float = -math.inf
    _synced_s: float = -math.inf
    _wishes: deque[tuple[float, int]] = field(default_factory=deque)
    _targets: deque[tuple[float, int]] = field(default_factory=deque)

    def __call__(self, sample: Sample, now: float) -> Decision:
        """Run llm-d's controller once a minute, then the horizontal pod autoscaler (HPA)."""
        if now - self._reconciled_s >= _RECONCILE_S:
            self._reconciled_s = now
            self._wanted = self._desired(sample)
        target = sample.target
        if now - self._synced_s >= _SYNC_S and self._wanted is not None:
            self._synced_s = now
            target = self._scaled(self._wanted, target, now)
        return Decision(target, 1.0, 0.0, f"saturation {self._smooth:.2f}", State())

    def _desired(self, sample: Sample) -> int:
        assert isinstance(sample, Observed)
        raw = max(
            (sample.ttft_p90_s or 0.0) / self.slo.ttft_s,
            (sample.time_per_token_p90_s or 0.0) / self.slo.time_per_token_s,
        )
        clamped = min(raw / self.tightness, _CAP)
        self._smooth = _ALPHA * clamped + (1 - _ALPHA) * self._smooth
        count, ready = max(1, sample.target), sample.running
        credited = self._smooth * (ready / count if 0 < ready < count else 1)
        wanted = count
        if credited > _UP:
            wanted += math.ceil(count * (credited / _UP - 1))
        elif self._smooth < _DOWN:
            wanted -= math.floor(count * (1 - self._smooth / _DOWN))
        return min(max(wanted, self.low), self.high)

    def _scaled(self, wish: int, target: int, now: float) -> int:
        """The new target, by Kubernetes' stabilisation and rate limits."""
        if not self._wishes:
            self._wishes.append((now, target))
        self._wishes.append((now, wish))
        self._targets.append((now, target))
        for past in (self._wishes, self._targets):
            while past[0][0] < now - _STABLE_DOWN_S:
                past.popleft()
        least = min(w for at, w in self._wishes if at >= now - _STABLE_UP_S)
        most = max(w for _, w in self._wishes)
        if least > target:
            before = min(t for at, t in self._targets if at >= now - _UP_PERIOD_S)
            return min(least, max(target, before + max(before, _UP_PODS)))
        if most < target:
            before = max(t for at, t in self._targets if at >= now - _DOWN_PERIOD_S)
            return max(most, min(target, before - _DOWN_PODS))
        return target
