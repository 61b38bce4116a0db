"""The policies that are simulated: ours, a fleet that stays, and Ray Serve's default.

Ray's has the arithmetic of ray 2.60. `serve/autoscaling_policy.py`: the default policy
(`_core_replica_queue_length_policy`), the delays around every policy (`_apply_delay_logic`);
`serve/_private/autoscaling_state.py`: total ongoing requests as the time-weighted mean of the
look-back period; `serve/config.py`: the defaults.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from mars_ray.autoscale.policy import Decision, State
from mars_ray.autoscale.sample import Sample
from mars_ray.autoscale.service_model import Level
from mars_ray.simulator.cases import Case
from mars_ray.simulator.config import PolicyName
from mars_ray.simulator.engine.run import EXACT, Deciding, Outcome, simulate

OURS: PolicyName = "mars"
# Nobody ships a fixed fleet: operators take twice what they need on average.
FIXED_SHARE = 2.0
# Requests that each replica should have under way (`AutoscalingConfig.target_ongoing_requests`).
TARGET_ONGOING = 2.0
_LOOK_BACK_S, _PUSH_S = 30.0, 10.0
_UPSCALE_S, _DOWNSCALE_S = 30.0, 600.0


def run(case: Case, policy: PolicyName) -> Outcome:
    """Simulate a policy with what it ships with. A fleet that changes begins with what its first
    minutes need."""
    config, model = case.config, case.model
    if policy == OURS:
        levels, set_point = model.levels, config.threshold.set_point
    else:
        levels, set_point = model.levels[:1] if policy.endswith("-verified") else EXACT, 1.0
    if policy.startswith("fixed"):
        wanted = math.ceil(FIXED_SHARE * case.need(levels[0]) - 1e-9)
        size = min(max(wanted, config.min_replicas), config.max_replicas)
        return simulate(case.unwatched().fixture(levels, set_point, size), Fixed(size))
    begin = first_replicas(case, levels, set_point, config.min_replicas)
    ray = RayDefault(TARGET_ONGOING, config.min_replicas, config.max_replicas)
    made = Deciding(config, model) if policy == OURS else ray
    return simulate(case.fixture(levels, set_point, begin), made)


def first_replicas(case: Case, levels: tuple[Level, ...], set_point: float, least: int) -> int:
    """Replicas that a fleet which changes begins with, at the lowest level above its set-point."""
    level = next(level for level in reversed(levels) if level.threshold >= min(1.0, set_point))
    return case.begins_with(level, least)


class Fixed:
    """A policy that always wants the same number of replicas."""

    def __init__(self, replicas: int, threshold: float = 1.0) -> None:
        self._decision = Decision(replicas, threshold, 0.0, "fixed", State())

    def __call__(self, sample: Sample, now: float) -> Decision:
        """The same decision at every tick."""
        return self._decision


def ongoing(sample: Sample) -> float:
    """Number of running and waiting requests of the whole fleet."""
    return sum(load.running for load in sample.loads) + (sample.waiting or 0)


@dataclass(slots=True)
class Delays:
    """Ray's delays: a wish to scale is followed only once it has lasted, at its newest value."""

    low: int
    high: int
    _up: bool | None = None
    _since: float = 0.0

    def apply(self, wish: float, target: int, now: float) -> int:
        """The new target."""
        wanted = math.ceil(wish)
        if wanted == target:
            self._up = None
            return self._bounded(target)
        up = wanted > target
        if self._up is not up:
            self._up, self._since = up, now
        if now - self._since + 1e-6 < (_UPSCALE_S if up else _DOWNSCALE_S):
            return self._bounded(target)
        self._up = None
        return self._bounded(wanted)

    def _bounded(self, replicas: int) -> int:
        return min(max(replicas, self.low), self.high)


@dataclass(slots=True)
class RayDefault:
    """Ray Serve's default policy: as many replicas as give each `target_ongoing` requests."""

    target_ongoing: float
    low: int
    high: int
    _delays: Delays = field(init=False)
    _seen: deque[tuple[float, float]] = field(default_factory=deque)
    _mean: float = 0.0
    _pushed_s: float = -math.inf

    def __post_init__(self) -> None:
        self._delays = Delays(self.low, self.high)

    def __call__(self, sample: Sample, now: float) -> Decision:
        """Decide by the metrics, which reach the controller every ten seconds."""
        self._seen.append((now, ongoing(sample)))
        while self._seen[0][0] < now - _LOOK_BACK_S:
            self._seen.popleft()
        if now - self._pushed_s >= _PUSH_S:
            self._pushed_s = now
            self._mean = sum(value for _, value in self._seen) / len(self._seen)
        if sample.running == 0:
            wish = float(max(1, sample.target)) if self._mean > 0 else float(sample.target)
        else:
            wish = self._mean / self.target_ongoing
        target = self._delays.apply(wish, sample.target, now)
        return Decision(target, 1.0, 0.0, f"{self._mean:.1f} ongoing requests", State())
