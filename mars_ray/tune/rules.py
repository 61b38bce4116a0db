"""When a trial ends early: pure functions of the scores seen so far.

Ray Tune's schedulers lose their state when a sweep is restored, and would then compare trials with
fewer others. These rules are fed again from the sweep's own record.
"""

from math import inf
from statistics import fmean, median
from typing import Protocol

from mars_ray.config.tune import AshaScheduler, MedianScheduler, NoScheduler


class Rule(Protocol):
    """A rule of early stopping. Higher scores are better; the steps of a trial increase."""

    def stops(self, trial: str, step: int, score: float) -> bool:
        """Add a score; whether the trial ends."""
        ...


class RunToEnd:
    """No trial ends early."""

    def stops(self, trial: str, step: int, score: float) -> bool:
        return False


class Asha:
    """Asynchronous successive halving: only the best 1/reduction of the scores pass a rung."""

    def __init__(self, config: AshaScheduler, total_steps: int) -> None:
        self._reduction = config.reduction
        self._rungs: dict[float, dict[str, float]] = {}
        milestone = float(config.grace_steps)
        while milestone < total_steps:
            self._rungs[milestone] = {}
            milestone *= config.reduction

    def stops(self, trial: str, step: int, score: float) -> bool:
        # A trial that skips rungs is judged at the highest one it has reached.
        stop = False
        for milestone, scores in self._rungs.items():
            if step >= milestone and trial not in scores:
                scores[trial] = score
                better = sum(other > score for other in scores.values())
                # The best so far always continues, since the first trial has no other to beat.
                stop = better >= max(1, int(len(scores) / self._reduction))
        return stop


class MedianRule:
    """A trial ends when its best score is below the median of the others' means up to its step."""

    def __init__(self, config: MedianScheduler) -> None:
        self._config = config
        self._scores: dict[str, list[tuple[int, float]]] = {}

    def stops(self, trial: str, step: int, score: float) -> bool:
        mine = self._scores.setdefault(trial, [])
        mine.append((step, score))
        others = [
            scores
            for name, scores in self._scores.items()
            if name != trial and scores[-1][0] >= step
        ]
        if step < self._config.grace_steps or len(others) < self._config.min_trials:
            return False
        means = [fmean([s for at, s in scores if at <= step] or [-inf]) for scores in others]
        return max(s for _, s in mine) < median(means)


def rule_of(scheduler: AshaScheduler | MedianScheduler | NoScheduler, total_steps: int) -> Rule:
    """The rule that a configuration names, before any score."""
    match scheduler:
        case AshaScheduler():
            return Asha(scheduler, total_steps)
        case MedianScheduler():
            return MedianRule(scheduler)
        case NoScheduler():
            return RunToEnd()
