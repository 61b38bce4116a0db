"""The result of a simulated run."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mars_ray.config.scaling import Slo
from mars_ray.simulator.engine.arrays import DONE, FAILED, SHED, Floats, Ints, Records
from mars_ray.simulator.engine.observe import token_times
from mars_ray.simulator.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Timeline:
    """State at every tick, arrays of shape [T]."""

    at_s: Floats
    arrivals_per_s: Floats  # offered since the last tick
    ready: Ints
    starting: Ints
    draining: Ints
    target: Ints
    threshold: Floats  # mean of the replicas that take requests; without any, the set-point
    outstanding: Ints  # requests in batches and queues


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one run. Arrays have shape [N], by request in the order of arrival."""

    trace: Trace
    requests: Records
    timeline: Timeline
    end_s: float
    replica_s: float
    below_set_point_s: float
    overhead_s: float
    too_long: int  # requests left out, because the model's context has no room for their prompts
    reasons: tuple[tuple[float, str], ...]  # times and reasons of decisions that changed something

    @property
    def ttft_s(self) -> Floats:
        """Times to first tokens, including the reply's network time; NaN where no token came."""
        return self.requests["first_s"] - self.requests["arrival_s"] + self.overhead_s

    def within(self, slo: Slo) -> np.ndarray:
        """Whether each request was answered in time; refused and failed ones were not."""
        requests = self.requests
        done = requests["outcome"] == DONE
        pace = token_times(requests, np.arange(len(done)))
        took_s = requests["end_s"] - requests["arrival_s"] + self.overhead_s
        late = took_s > self.trace.deadline_s
        return done & (self.ttft_s <= slo.ttft_s) & (pace <= slo.time_per_token_s) & ~late


def summarise(outcome: Outcome, slo: Slo, accuracy: float) -> dict[str, Any]:
    """Figures of a run; `accuracy` is that of lossless answers, in percent.

    Effective accuracy is the share of offered requests answered correctly and in time; a lowered
    threshold counts by its tokens (Model-Switching, HotCloud'20, names the metric).
    """
    requests = outcome.requests
    done = requests["outcome"] == DONE
    within = outcome.within(slo)
    points = requests["points"] / np.maximum(1, requests["output"])
    pace = token_times(requests, np.flatnonzero(done))
    return {
        "requests": len(done),
        "too_long": outcome.too_long,
        "done": int(done.sum()),
        "shed": int((requests["outcome"] == SHED).sum()),
        "failed": int((requests["outcome"] == FAILED).sum()),
        "retried": int((requests["retries"] > 0).sum()),
        "attainment": float(within.mean()),
        "effective_accuracy": float(np.where(within, accuracy - points, 0).mean()),
        "points_lost": float(points[done].mean()) if done.any() else 0.0,
        "ttft_p50_s": _quantile(outcome.ttft_s[done], 0.5),
        "ttft_p90_s": _quantile(outcome.ttft_s[done], 0.9),
        "ttft_p99_s": _quantile(outcome.ttft_s[done], 0.99),
        "time_per_token_p90_s": _quantile(pace, 0.9),
        "time_per_token_p99_s": _quantile(pace, 0.99),
        "replica_s": outcome.replica_s,
        # A run may end at time 0.
        "mean_replicas": outcome.replica_s / max(1e-9, outcome.end_s),
        "peak_replicas": int(outcome.timeline.ready.max()),
        "below_set_point_s": outcome.below_set_point_s,
        "found_share": float(requests["found"].sum() / max(1, requests["prompt"].sum())),
        "floor_breaches": int((requests["lowest"] > requests["pinned"]).sum()),
        "end_s": outcome.end_s,
    }


def _quantile(values: Floats, q: float) -> float:
    return float(np.quantile(values, q)) if len(values) else float("inf")
