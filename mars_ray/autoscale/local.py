"""The fast loop inside one replica: the policy's law of the queue, for the replica's own queue.

The policy sees a fleet by reports that are half a second old, and takes what there is to be spread
evenly. A replica knows its own queue at once. So one that has more than its share, since another
died or many prompts share a prefix, lowers its threshold by itself, among those that the policy
allows at the moment and never above the policy's; and it goes on when no policy is heard any more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mars_ray.autoscale.forecast import Load, bucket_s, observe
from mars_ray.autoscale.ladder import Rung
from mars_ray.autoscale.quality import Pressure, Quality, steer
from mars_ray.autoscale.seen import fast_span_s
from mars_ray.config.scaling import ScalingConfig


@dataclass(slots=True)
class LocalLoop:
    """One per replica. Without rungs the policy's threshold is in force."""

    config: ScalingConfig
    threshold: float  # the policy's
    rungs: Sequence[Rung] = ()  # that it allows, the highest first
    _load: Load = field(default_factory=Load)
    _quality: Quality = field(default_factory=Quality)
    _tick_s: float | None = None
    _arrived: float = 0.0

    def tick(self, in_system: float, arrived: float, now: float) -> float:
        """The threshold in force from now on.

        `in_system` requests decode or wait here; so many have `arrived` since the start. `now` is
        a clock in seconds that never goes back.
        """
        dt = now - self._tick_s if self._tick_s is not None else 0.0
        rate = (arrived - self._arrived) / dt if dt > 0 else 0.0
        self._tick_s, self._arrived = now, arrived
        if dt > 0:
            width = bucket_s(self.config.cold_start_s)
            self._load = observe(self._load, rate, dt, fast_span_s(self.config), width)
        if not self.rungs:
            return self.threshold
        pressure = Pressure(self._load.fast, in_system, 1, max(self.config.slo.ttft_s, dt))
        self._quality = steer(self._quality, self.rungs, pressure, dt, self.config)
        own = self._quality.threshold
        return self.threshold if own is None else min(self.threshold, own)
