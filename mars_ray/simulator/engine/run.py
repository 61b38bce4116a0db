"""One simulated run: the virtual clock, the controller's ticks, the scenario; and its result."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mars_ray.autoscale.policy import Decision, State, decide
from mars_ray.autoscale.sample import Sample
from mars_ray.autoscale.service_model import PLAIN, Level, Mix, ServiceModel
from mars_ray.config.scaling import ScalingConfig, Slo
from mars_ray.simulator.config import Cluster, Kill, Slowdown
from mars_ray.simulator.engine.arrays import (
    DONE,
    DRAINING,
    ENDS,
    FAILED,
    FREE,
    NEXT,
    OPEN,
    READY,
    SHED,
    STARTING,
    Floats,
    Ints,
    Records,
    make_tables,
    make_world,
)
from mars_ray.simulator.engine.core import advance, drain, kill, set_levels, set_slowness, start
from mars_ray.simulator.engine.observe import Observer, token_times
from mars_ray.simulator.traces.trace import Trace, within_context

# Plain decoding: no masks, whatever the threshold.
EXACT = (Level(1.0, 0.0, (PLAIN,)),)
# A run whose queues never empty ends this long after the last arrival; open requests have failed.
_PATIENCE_S = 7200.0


# One run's policy, with its memory: replicas and threshold from now on, decided from what a cluster
# could observe.
Policy = Callable[[Sample, float], Decision]


class Deciding:
    """Our own policy, which also runs under Ray Serve."""

    def __init__(
        self, config: ScalingConfig, model: ServiceModel, state: State | None = None
    ) -> None:
        self._config = config
        self._model = model
        self._state = state or State()

    def __call__(self, sample: Sample, now: float) -> Decision:
        """The result of `decide`, called with the state that it returned last time."""
        decision = decide(sample, self._state, self._config, self._model, now)
        self._state = decision.state
        return decision


@dataclass(frozen=True, slots=True)
class Fixture:
    """All parts of a run except its policy."""

    trace: Trace
    model: ServiceModel
    cluster: Cluster
    levels: tuple[Level, ...]
    set_point: float  # threshold to begin with
    replicas: int  # warm ones to begin with; more if the policy wants them at once
    most: int  # most replicas at a time
    seed: int
    slo: Slo = field(default_factory=Slo)  # by which requests count as late


@dataclass(frozen=True, slots=True)
class Timeline:
    """State at every tick, arrays of shape [T]."""

    at_s: Floats
    arrivals_per_s: Floats  # offered since the last tick
    ready: Ints
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


def simulate(fixture: Fixture, policy: Policy) -> Outcome:
    """Run a policy. The same fixture and an equal policy give the same outcome."""
    return _Run(fixture, policy).run()


class _Run:
    def __init__(self, fixture: Fixture, policy: Policy) -> None:
        trace = within_context(fixture.trace, fixture.model.max_model_len)
        given = self.fixture = replace(fixture, trace=trace)
        self.policy = policy
        cluster = given.cluster
        self.world = make_world(
            given.trace,
            [level.threshold for level in given.levels],
            # Draining replicas keep their places while their successors start.
            places=2 * given.most + 4,
            batch=given.model.max_batch,
            retries=cluster.retries,
            seed=given.seed,
            spread=given.model.spread,
        )
        self.tables = make_tables(
            given.model,
            given.levels,
            Mix(float(given.trace.prompt_tokens.mean()), float(given.trace.output_tokens.mean())),
            cluster,
        )
        self.observer = Observer(self.world, cluster, given.slo)
        self.thresholds = np.array([level.threshold for level in given.levels])
        self.target = given.replicas
        self.threshold = given.set_point
        self.shed = 0.0
        self.ordered = 0  # replicas ordered after the beginning
        self.coming: list[tuple[float, float]] = []  # ready at; cold start
        self.cold_start_s: float | None = None  # newest measured
        self.lowered_s = 0.0
        self.ticks: list[tuple[float, ...]] = []
        start(self.world, given.replicas, 0.0, 0.0, self._level_of(given.set_point))

    def run(self) -> Outcome:
        trace, cluster = self.fixture.trace, self.fixture.cluster
        events = sorted((*cluster.kills, *cluster.slowdowns), key=lambda event: event.at_s)
        rng = np.random.default_rng([self.fixture.seed, 3])
        now, tick, total = 0.0, 0, len(trace)
        while self.world.counts[ENDS] < total and now < trace.duration_s + _PATIENCE_S:
            now = tick * cluster.tick_s
            while events and events[0].at_s <= now:
                self._happen(events.pop(0), rng)
            advance(self.world, self.tables, now, self.shed)
            self._log(now)
            sample = self.observer.sample(now, self.target, self.cold_start_s)
            self._apply(self.policy(sample, now), now)
            tick += 1
        return self._outcome(now)

    def _apply(self, decision: Decision, now: float) -> None:
        """Follow a decision; replicas that it orders at the beginning are ready already."""
        self.target = min(max(0, decision.replicas), self.fixture.most)
        self.shed = decision.shed
        if decision.threshold_setpoint is not None:
            self.threshold = decision.threshold_setpoint
        level = self._level_of(self.threshold)
        set_levels(self.world, level, now)
        status = self.world.replicas["status"]
        alive = int(np.count_nonzero((status == READY) | (status == STARTING)))
        cluster = self.fixture.cluster
        for _ in range(self.target - alive):
            cold_s = 0.0
            if now > 0:
                first = cluster.first_cold_starts_s[self.ordered :]
                cold_s = first[0] if first else cluster.cold_start_s
                self.ordered += 1
                self.coming.append((now + cold_s, cold_s))
            start(self.world, 1, now, now + cold_s, level)
        if alive > self.target:
            drain(self.world, alive - self.target, now)
        self.coming.sort()
        while self.coming and self.coming[0][0] <= now:
            _, self.cold_start_s = self.coming.pop(0)

    def _level_of(self, threshold: float) -> int:
        kept = [level.threshold >= min(1.0, threshold) for level in self.fixture.levels]
        return max(0, sum(kept) - 1)

    def _happen(self, event: Kill | Slowdown, rng: np.random.Generator) -> None:
        if isinstance(event, Slowdown):
            # A step that begins at that very moment is already slower.
            advance(self.world, self.tables, math.nextafter(event.at_s, -1), self.shed)
            set_slowness(self.world, event.slowness, event.at_s)
            return
        advance(self.world, self.tables, event.at_s, self.shed)
        ready = np.flatnonzero(self.world.replicas["status"] == READY)
        places = rng.choice(ready, min(event.replicas, len(ready)), replace=False)
        kill(self.world, self.tables, places, event.at_s)

    def _log(self, now: float) -> None:
        status, counts = self.world.replicas["status"], self.world.counts
        ready = status == READY
        used = self.thresholds[self.world.replicas["level"][ready]]
        threshold = float(np.mean(used)) if len(used) else self.threshold
        self.ticks.append(
            (
                now,
                float(counts[NEXT]),
                int(ready.sum()),
                int((status == DRAINING).sum()),
                self.target,
                threshold,
                int(counts[NEXT] - counts[ENDS]),
            )
        )
        if threshold < self.fixture.set_point - 1e-9:
            self.lowered_s += self.fixture.cluster.tick_s

    def _outcome(self, now: float) -> Outcome:
        end_s = max(now, self.fixture.trace.duration_s)
        replicas, requests = self.world.replicas, self.world.requests
        alive = replicas["status"] != FREE
        spent = float(self.world.spent_s[0] + (end_s - replicas["born_s"][alive]).sum())
        requests["outcome"][requests["outcome"] == OPEN] = FAILED
        at_s, arrived, *rest = (np.array(column) for column in zip(*self.ticks, strict=True))
        gaps = np.diff(at_s, prepend=at_s[0] - self.fixture.cluster.tick_s)
        return Outcome(
            trace=self.fixture.trace,
            requests=requests,
            timeline=Timeline(at_s, np.diff(arrived, prepend=0.0) / gaps, *rest),
            end_s=end_s,
            replica_s=spent,
            below_set_point_s=self.lowered_s,
            overhead_s=self.fixture.cluster.overhead_s,
        )


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
        "done": int(done.sum()),
        "shed": int((requests["outcome"] == SHED).sum()),
        "failed": int((requests["outcome"] == FAILED).sum()),
        "attainment": float(within.mean()),
        "effective_accuracy": float(np.where(within, accuracy - points, 0).mean()),
        "points_lost": float(points[done].mean()) if done.any() else 0.0,
        "ttft_p90_s": _quantile(outcome.ttft_s[done], 0.9),
        "time_per_token_p90_s": _quantile(pace, 0.9),
        "replica_s": outcome.replica_s,
        # A run may end at time 0.
        "mean_replicas": outcome.replica_s / max(1e-9, outcome.end_s),
        "peak_replicas": int(outcome.timeline.ready.max()),
        "below_set_point_s": outcome.below_set_point_s,
    }


def _quantile(values: Floats, q: float) -> float:
    return float(np.quantile(values, q)) if len(values) else float("inf")
