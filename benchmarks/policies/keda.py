"""KEDA on the queue of vLLM: requests that wait, over a target for each replica.

The default trigger of vLLM's production stack (helm/templates/scaledobject-vllm.yaml of
github.com/vllm-project/production-stack) takes `vllm:num_requests_waiting` with a threshold of 5,
and leaves the rest to the pod autoscaler that KEDA creates, with Kubernetes' own behaviour
(keda.sh/docs/concepts/scaling-deployments).
"""

from dataclasses import dataclass, field

from mars_ray.autoscale.policy import Decision, State
from mars_ray.autoscale.sample import Sample
from policies.pod_autoscaler import Behaviour, PodAutoscaler, average_value

QUEUE_LENGTH = 5.0


@dataclass(slots=True)
class Keda:
    """As many replicas as leave each `queue_length` waiting requests."""

    queue_length: float
    low: int
    high: int
    _autoscaler: PodAutoscaler = field(init=False)

    def __post_init__(self) -> None:
        self._autoscaler = PodAutoscaler(Behaviour(), self.low, self.high)

    def __call__(self, sample: Sample, now: float) -> Decision:
        """Decide by the queue that the newest metrics tell."""
        waiting, target = sample.waiting or 0, sample.target
        if self._autoscaler.due(now):
            wish = average_value(waiting, self.queue_length, target)
            target = self._autoscaler.scaled(wish, target, now)
        return Decision(target, 1.0, 0.0, f"{waiting} requests wait", State())
