"""Policies that do not look at the load: a constant fleet, and decisions made before."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mars_ray.autoscale.sample import Sample
from mars_ray.autoscale.state import Decision, State
from mars_ray.simulator.engine.run import Policy


class Fixed:
    """A policy that always wants the same number of replicas."""

    def __init__(self, replicas: int, threshold: float = 1.0) -> None:
        self._decision = Decision(replicas, threshold, 0.0, "fixed", State())

    def __call__(self, sample: Sample, now: float) -> Decision:
        """The same decision at every tick."""
        return self._decision


@dataclass(slots=True)
class Recorded:
    """Another policy, with all of its decisions kept."""

    policy: Policy
    decisions: list[Decision] = field(default_factory=list)

    def __call__(self, sample: Sample, now: float) -> Decision:
        """What the policy decides."""
        self.decisions.append(self.policy(sample, now))
        return self.decisions[-1]


class Unlowered:
    """Decisions of another run, tick by tick, but for the threshold, which stays at 1.

    What lowering it brought is the difference between the two runs: same requests, same replicas.
    """

    def __init__(self, decisions: Sequence[Decision]) -> None:
        self._decisions = [replace(one, threshold_setpoint=1.0) for one in decisions]
        self._tick = -1

    def __call__(self, sample: Sample, now: float) -> Decision:
        """The decision of this tick; the last one if that run had ended."""
        self._tick = min(self._tick + 1, len(self._decisions) - 1)
        return self._decisions[self._tick]
