"""A policy whose fleet does not change, and one that knows the future load."""

from collections.abc import Sequence

from mars_ray.autoscale.sample import Sample
from mars_ray.autoscale.state import Decision, State


class Fixed:
    """A policy that always wants the same number of replicas."""

    def __init__(self, replicas: int, threshold: float = 1.0) -> None:
        self._decision = Decision(replicas, threshold, 0.0, "fixed", State())

    def __call__(self, sample: Sample, now: float) -> Decision:
        """The same decision at every tick."""
        return self._decision


class Clairvoyant:
    """A policy that knows the trace, and has replicas ready when they are needed.

    `needs` gives the replicas for each window of `window_s` seconds. Replicas needed by the time
    that one ordered now would be ready are ordered now.
    """

    def __init__(self, needs: Sequence[float], window_s: float, cold_start_s: float) -> None:
        self._needs = needs
        self._window_s = window_s
        self._cold_start_s = cold_start_s

    def __call__(self, sample: Sample, now: float) -> Decision:
        """The most replicas that the trace needs from now until a cold start and a window later."""
        first = int(now / self._window_s)
        last = int((now + self._cold_start_s) / self._window_s) + 1
        ahead = self._needs[min(first, len(self._needs) - 1) : last + 1]
        replicas = max(1, round(max(ahead)))
        return Decision(replicas, 1.0, 0.0, "knows the trace", State())
