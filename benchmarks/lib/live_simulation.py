"""The simulation of a live run (live_autoscale.py): the same requests, the same policy.

The simulator is given four facts about the live run:

- how many times longer steps take than the service model says. It is fitted for each ten seconds
  with answers at threshold 1, so that these take as long in total as they did live. Two shared
  cores run replicas, proxy, ingress, controller and clients, and the host has other guests.
- how long each replica took to start
- what the path of a reply added to a first token: the median over requests that met no other
- for how long the policy had seen no requests before

It has to find by itself when requests wait and for how long, the number of replicas over time, and
the threshold in force.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lib.live_load import Asked
from mars_ray.autoscale.sample import Sample
from mars_ray.autoscale.service_model import ServiceModel, sized
from mars_ray.config.serve import ServeJob
from mars_ray.simulator.config import Cluster, Kill, Slowdown
from mars_ray.simulator.engine.arrays import DONE
from mars_ray.simulator.engine.run import Deciding, Fixture, Outcome, simulate
from mars_ray.simulator.traces.trace import Trace

LOOK_S = 0.5
_APPROACHES = 6  # iterations that fit the slowness of the engines
_PACE_S = 10.0  # window for which one slowness holds
_FEW = 2  # this many answers are too few to fit it
_COLD_S = 15.0  # if no replica was started
_QUIET_S = 5.0  # for kept runs that do not record how long the policy had been running by second 0


@dataclass(slots=True)
class Watched:
    """The service as seen from outside, every LOOK_S."""

    at_s: list[float] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    starting: list[int] = field(default_factory=list)
    quiet_s: float = _QUIET_S  # how long the policy had been running at the first request
    stopping: list[int] = field(default_factory=list)
    threshold: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Twin:
    """The simulated run, and the facts it was given."""

    outcome: Outcome
    told: Cluster

    @property
    def answers_s(self) -> list[float]:
        """Durations of the whole answers."""
        rows = self.outcome.requests[self.outcome.requests["outcome"] == DONE]
        return (rows["end_s"] - rows["arrival_s"] + self.told.overhead_s).tolist()


def simulated(
    job: ServeJob,
    model: ServiceModel,
    rows: list[Asked],
    watched: Watched,
    kill_at_s: float | None,
) -> Twin:
    """The simulation of a live run that is over."""
    starts = _cold_starts(watched) or [_COLD_S]
    told = Cluster(
        first_cold_starts_s=tuple(starts),
        cold_start_s=statistics.fmean(starts),
        tick_s=LOOK_S,
        metrics_lag_s=LOOK_S,
        routing="least-outstanding",
        step_tokens=sized(model, job.engine, job.scaling.slo.time_per_token_s).step_rows,
        kills=(Kill(at_s=kill_at_s),) if kill_at_s else (),
    )
    run = partial(_run, job, model, rows, watched.quiet_s)
    told = _paced(told, run, rows)
    told = told.model_copy(update={"overhead_s": _overhead(rows, run(told))})
    return Twin(run(told), told)


def _cold_starts(watched: Watched) -> list[float]:
    """Seconds from the first look with a starting replica to the first with one more ready."""
    starts, since = [], None
    for at, ready, starting, before in zip(
        watched.at_s, watched.ready, watched.starting, [0, *watched.ready], strict=False
    ):
        if since is not None and ready > before:
            starts.append(at - since)
            since = at if starting else None
        elif since is None and starting:
            since = at
    return starts


def _paced(told: Cluster, run: Callable[[Cluster], Outcome], rows: list[Asked]) -> Cluster:
    """The cluster with slowdowns that make the answers of each window take as long as live.

    It is found by iteration, because batches grow with the slowdown. Only answers whose threshold
    neither run lowered count: a lower one would be mistaken for a faster machine.
    """
    tokens, first_s, end_s = (
        np.array([getattr(row, name) for row in rows]) for name in ("tokens", "first_s", "end_s")
    )
    lossless = np.array([row.threshold == 1 for row in rows]) & (tokens > 1)
    window = ((first_s + end_s) / 2 / _PACE_S).astype(int)
    slowness = np.ones(window.max() + 1)
    for _ in range(_APPROACHES):
        requests = run(told).requests
        alike = lossless & (requests["lowest"] == 0) & (requests["outcome"] == DONE)
        known = [i for i in range(len(slowness)) if (alike & (window == i)).sum() > _FEW]
        for i in known:
            here = alike & (window == i)
            simulated_s = (requests["end_s"] - requests["first_s"])[here]
            slowness[i] *= (end_s - first_s)[here].sum() / simulated_s.sum()
        told = told.model_copy(update={"slowdowns": _slowdowns(known, slowness)})
    return told


def _slowdowns(known: list[int], slowness: np.ndarray) -> tuple[Slowdown, ...]:
    """The slowdowns, each in force until the next; the first from the beginning."""
    return tuple(
        Slowdown(at_s=i * _PACE_S if i != known[0] else 0.0, slowness=float(slowness[i]))
        for i in known
    )


def _overhead(rows: list[Asked], outcome: Outcome) -> float:
    """Seconds of a reply's path: first-token time beyond the engine's, with no request ahead."""
    at_s, end_s = (np.array([getattr(row, name) for row in rows]) for name in ("at_s", "end_s"))
    first_s = np.array([row.first_s for row in rows])
    free = [bool((end_s[:i] < at_s[i]).all()) for i in range(len(rows))]
    return max(0.0, float(np.median((first_s - at_s - outcome.ttft_s)[free])))


def _run(
    job: ServeJob, model: ServiceModel, rows: list[Asked], quiet_s: float, cluster: Cluster
) -> Outcome:
    trace = Trace(
        "live",
        np.array([row.at_s for row in rows]),
        np.array([row.prompt_tokens for row in rows]),
        np.array([row.tokens for row in rows]),
        pinned_threshold=np.array([float(row.is_pinned) for row in rows]),
    )
    fixture = Fixture(
        trace,
        model,
        cluster,
        model.levels,
        set_point=1.0,
        replicas=1,
        most=job.scaling.max_replicas,
        seed=0,
    )
    policy = Deciding(job.scaling, model)
    nobody = Sample(running=1, target=1, arrivals_per_s=0.0, refused_per_s=0.0, age_s=LOOK_S)
    for at_s in np.arange(-quiet_s, 0.0, LOOK_S).tolist():
        policy(nobody, at_s)
    return simulate(fixture, policy)
