"""The policy: `decide` says how many replicas, at which threshold, and why. Pure."""

from mars_ray.config.scaling import ScalingConfig
from mars_ray.scaling.decision import Decision, State
from mars_ray.scaling.sample import Sample
from mars_ray.scaling.service_model import ServiceModel


def decide(
    sample: Sample, state: State, config: ScalingConfig, model: ServiceModel, now: float
) -> Decision:
    """The next replicas, threshold and share to shed. `now` is any clock in seconds.

    The answer lies within the configured bounds whatever the sample holds. Call it as often as
    once a step of the controller: what it does depends on elapsed time, not on the number of calls.
    """
    del state, model, now
    replicas = min(max(sample.target, config.fewest), config.max_replicas)
    return Decision(replicas, config.threshold.set_point, 0.0, "holds", State())
