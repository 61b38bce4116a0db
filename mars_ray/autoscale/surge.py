"""Load that jumps: what the last seconds say and the forecast does not explain.

A surge counts as the load for one cold start, until the forecast knows it (the panic window of
Knative's autoscaler): not all of it, but the share that earlier surges had kept by the time that
replicas ordered for them were ready. A crowd that stays is met at once; bursts that are over before
a replica can help order none, and the threshold carries them.
"""

from dataclasses import dataclass, replace

# Surges that the share remembers; before the first, one that kept all is taken to have been there.
_REMEMBERED = 8


@dataclass(frozen=True, slots=True)
class Surge:
    """The one that is on, if `left_s` is not 0, and what earlier ones kept. Requests per second."""

    rate: float = 0.0
    usual: float = 0.0  # forecast when it began
    left_s: float = 0.0
    kept: float = 1.0  # share of the rise, mean of the surges so far
    count: int = 1

    @property
    def expected(self) -> float:
        """The load to count on."""
        return self.usual + self.kept * (self.rate - self.usual)


def passed(surge: Surge, level: float, dt: float) -> Surge:
    """After `dt` seconds. One that ends now is compared with the `level` that there is now."""
    if surge.left_s == 0:
        return surge
    if surge.left_s > dt:
        return replace(surge, left_s=surge.left_s - dt)
    rise = surge.rate - surge.usual
    kept = min(1.0, max(0.0, (level - surge.usual) / rise)) if rise > 0 else 1.0
    count = min(_REMEMBERED, surge.count + 1)
    return replace(surge, left_s=0.0, count=count, kept=surge.kept + (kept - surge.kept) / count)


def noted(surge: Surge, rate: float, usual: float, lasts_s: float) -> Surge:
    """With a surge of this rate, which tops the one that is on if there is one."""
    usual = surge.usual if surge.left_s else usual
    return replace(surge, rate=rate, usual=usual, left_s=lasts_s)
