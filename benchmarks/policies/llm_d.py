"""llm-d's two laws: replicas by latencies over their objectives, and by tokens that wait.

By latencies: github.com/llm-d/llm-d, docs/architecture/autoscaling/slo-aware-keda.md, with its
defaults and those of its HPA. llm-d prefers predicted latencies; here they are measured ones.

By tokens: guides/workload-autoscaling/keda-epp-token-aware of the same repository, with the
defaults of its overlay for replicas that do both prompts and answers (optimized-baseline).
"""

import math
from collections import deque
from dataclasses import dataclass, field

from mars_ray.autoscale.policy import Decision, State
from mars_ray.autoscale.sample import Sample
from mars_ray.autoscale.service_model import ServiceModel
from mars_ray.config.scaling import Slo
from mars_ray.simulator.engine.observe import Observed
from policies.pod_autoscaler import (
    SYNC_S,
    Behaviour,
    PodAutoscaler,
    average_value,
)

_UP, _DOWN, _CAP, _SMOOTH_S = 0.55, 0.40, 2.0, 45.0
_LATENCY_BEHAVIOUR = Behaviour(
    up_stable_s=30, up_period_s=60, down_stable_s=180, down_pods=1, down_period_s=120
)
# Seconds of prompts that may wait for each replica, and the share of its cache that may be full.
BACKLOG_S, _CACHE_SHARE = 1.5, 0.8
_TOKENS_BEHAVIOUR = Behaviour(
    up_pods=1, up_share=0, up_period_s=180, down_stable_s=300, down_pods=1, down_period_s=300
)


@dataclass(slots=True)
class LlmD:
    """llm-d's law of latencies, for an SLO times `tightness`: below 1 it reacts as if less were
    allowed, above 1 as if more were."""

    slo: Slo
    tightness: float
    low: int
    high: int
    _autoscaler: PodAutoscaler = field(init=False)
    _recorded_s: float = -math.inf
    _recent: deque[tuple[float, float]] = field(default_factory=deque)
    _smooth: float = 0.0

    def __post_init__(self) -> None:
        self._autoscaler = PodAutoscaler(_LATENCY_BEHAVIOUR, self.low, self.high)

    def __call__(self, sample: Sample, now: float) -> Decision:
        """Record the saturation every 15 s, and decide by its mean over 45 s."""
        if now - self._recorded_s >= SYNC_S:
            self._recorded_s = now
            self._recent.append((now, min(self._saturation(sample), _CAP)))
            while self._recent[0][0] <= now - _SMOOTH_S:
                self._recent.popleft()
            self._smooth = sum(value for _, value in self._recent) / len(self._recent)
        target = sample.target
        if self._autoscaler.due(now):
            target = self._autoscaler.scaled(self._desired(sample), target, now)
        return Decision(target, 1.0, 0.0, f"saturation {self._smooth:.2f}", State())

    def _saturation(self, sample: Sample) -> float:
        assert isinstance(sample, Observed)
        first = (sample.ttft_p90_s or 0.0) / self.slo.ttft_s
        each = (sample.time_per_token_p90_s or 0.0) / self.slo.time_per_token_s
        return max(first, each) / self.tightness

    def _desired(self, sample: Sample) -> int:
        """More replicas than are wanted already only for what those on their way will not carry."""
        count, ready = max(1, sample.target), sample.running
        if self._smooth > _UP:
            credited = self._smooth * (ready / count if 0 < ready < count else 1)
            return count + math.ceil(count * (credited / _UP - 1))
        if self._smooth < _DOWN:
            return count - math.floor(count * (1 - self._smooth / _DOWN))
        return count


@dataclass(slots=True)
class LlmDTokens:
    """llm-d's law of tokens: each replica may have `backlog_s` seconds of prompts waiting.

    Its speed with prompts is what llm-d calibrates on an idle service: that of a full step.
    """

    model: ServiceModel
    backlog_s: float
    low: int
    high: int
    _autoscaler: PodAutoscaler = field(init=False)

    def __post_init__(self) -> None:
        self._autoscaler = PodAutoscaler(_TOKENS_BEHAVIOUR, self.low, self.high)

    def __call__(self, sample: Sample, now: float) -> Decision:
        """Decide by whichever needs more replicas: prompts that wait, or full caches."""
        rows = self.model.step_rows
        waits_s = _backlog(sample) * self.model.step_s(rows) / rows
        target = sample.target
        if self._autoscaler.due(now):
            wish = max(
                average_value(waits_s, self.backlog_s, target),
                average_value(self._full_caches(sample), _CACHE_SHARE, target),
            )
            target = self._autoscaler.scaled(wish, target, now)
        return Decision(target, 1.0, 0.0, f"{waits_s:.1f} s of prompts wait", State())

    def _full_caches(self, sample: Sample) -> float:
        """Cached tokens of all running sequences, each half way through a mean answer, over the
        cache of one replica."""
        if self.model.cache_tokens is None:
            return 0.0
        running = sum(load.running for load in sample.loads)
        context = (sample.prompt_tokens or 0.0) + (sample.output_tokens or 0.0) / 2
        return running * context / self.model.cache_tokens


def _backlog(sample: Sample) -> float:
    """Prompt tokens of requests without a first token."""
    assert isinstance(sample, Observed)
    return float(sample.backlog_tokens or 0)
