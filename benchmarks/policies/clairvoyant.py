"""A heuristic that knows the trace: in every half minute the smallest fixed fleet that keeps it.

It is no bound: who lets a few requests be late at the right moment takes fewer replicas.
"""

import math
from collections.abc import Sequence

import numpy as np

from mars_ray.autoscale.policy import Decision, State
from mars_ray.autoscale.sample import Sample
from mars_ray.simulator.cases import Case, Fixed
from mars_ray.simulator.engine.run import Outcome, simulate

_WINDOW_S = 30.0
# Shares of a window's requests that it wants in time, from cheap to safe.
_SHARES = (0.9, 0.97, 0.99, 1.0)
# Ratio of the sizes of fixed fleets that are tried.
_RATIO = 1.3
_ALL = 0.9995


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


def clairvoyant(case: Case) -> Outcome:
    """Its cheapest run that attains, else its safest."""
    sizes, attained_SW = _attained(case)
    for share in _SHARES[:-1]:
        outcome = _run(case, share, sizes, attained_SW)
        if outcome.within(case.slo).mean() >= case.slo.attainment:
            return outcome
    return _run(case, _SHARES[-1], sizes, attained_SW)


def _run(case: Case, share: float, sizes: list[int], attained_SW: np.ndarray) -> Outcome:
    levels = case.model.levels[:1]
    # A size that keeps the share, as all larger ones do.
    kept = np.logical_and.accumulate((attained_SW >= share)[::-1])[::-1]
    needs = [sizes[min(first, len(sizes) - 1)] for first in (~kept).sum(0).tolist()]
    policy = Clairvoyant(needs, _WINDOW_S, case.cluster.cold_start_s)
    return simulate(case.fixture(levels, 1.0, needs[0]), policy)


def _attained(case: Case) -> tuple[list[int], np.ndarray]:
    """Sizes of fixed fleets, and the share of each window's requests that each keeps in time, of
    shape [S, W]."""
    window = (case.trace.arrival_s / _WINDOW_S).astype(int)
    count = np.maximum(1, np.bincount(window))
    sizes, rows, size = [], [], case.config.min_replicas
    while size <= case.config.max_replicas:
        fixture = case.unwatched().fixture(case.model.levels[:1], 1.0, size)
        within = simulate(fixture, Fixed(size)).within(case.slo)
        late = np.bincount(window, ~within, len(count))
        sizes.append(size)
        rows.append(1 - late / count)
        if within.mean() > _ALL or size == case.config.max_replicas:
            break
        size = min(max(size + 1, math.ceil(_RATIO * size)), case.config.max_replicas)
    return sizes, np.array(rows)
