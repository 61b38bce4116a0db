"""What the simulator calls at every tick."""

from typing import Protocol

from mars_ray.autoscale.decide import decide
from mars_ray.autoscale.sample import Sample
from mars_ray.autoscale.service_model import ServiceModel
from mars_ray.autoscale.state import Decision, State
from mars_ray.config.scaling import ScalingConfig


class Policy(Protocol):
    """One run's policy, with its memory."""

    def __call__(self, sample: Sample, now: float) -> Decision:
        """Replicas and threshold from now on, by what a cluster could see."""
        ...


class Deciding:
    """The policy that Ray Serve runs too."""

    def __init__(self, config: ScalingConfig, model: ServiceModel) -> None:
        self._config = config
        self._model = model
        self._state = State()

    def __call__(self, sample: Sample, now: float) -> Decision:
        """As `decide`, with the state that it returned the last time."""
        decision = decide(sample, self._state, self._config, self._model, now)
        self._state = decision.state
        return decision
