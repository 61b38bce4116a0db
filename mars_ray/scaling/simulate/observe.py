"""What a real cluster could see of a simulated one.

Counters, queues and latencies of requests that got their first token or ended. Not the trace, not
the tokens that a running request is going to make, not the service model's truth.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mars_ray.scaling.sample import PINNED as PINNED_CLASS
from mars_ray.scaling.sample import ReplicaLoad, Sample
from mars_ray.scaling.simulate.arrays import (
    DONE,
    DRAINING,
    ENDS,
    FIRSTS,
    HELD,
    NEXT,
    PINNED,
    READY,
    REFUSED,
    STARTING,
    Ints,
    Records,
    World,
)


@dataclass(frozen=True, slots=True)
class _Counters:
    """At one moment, since the beginning."""

    at_s: float = 0.0
    arrivals: int = 0
    pinned: int = 0
    refused: int = 0
    firsts: int = 0
    ends: int = 0


@dataclass(slots=True)
class Observer:
    """Takes a sample each tick and hands out the newest that is old enough."""

    world: World
    lag_s: float
    latency_window_s: float
    _past: deque[_Counters] = field(default_factory=lambda: deque([_Counters()]))
    _samples: deque[tuple[float, Sample]] = field(default_factory=deque)
    _means: tuple[float | None, float | None] = (None, None)

    def sample(self, now: float, target: int, cold_start_s: float | None) -> Sample:
        """The controller knows its own target and replicas at once; metrics come late."""
        self._samples.append((now, self._measure(now)))
        while len(self._samples) > 1 and self._samples[1][0] <= now - self.lag_s + 1e-9:
            self._samples.popleft()
        at_s, measured = self._samples[0]
        known = {
            "running": int(np.count_nonzero(self.world.replicas["status"] == READY)),
            "target": target,
            "starting_ages_s": self._starting_ages(now),
            "cold_start_s": cold_start_s,
        }
        if at_s > now - self.lag_s + 1e-9:
            return Sample(**known)  # nothing has arrived yet
        return replace(measured, age_s=now - at_s, **known)

    def _starting_ages(self, now: float) -> tuple[float, ...]:
        starting = self.world.replicas["status"] == STARTING
        return tuple(sorted((now - self.world.replicas["born_s"][starting]).tolist(), reverse=True))

    def _measure(self, now: float) -> Sample:
        before = self._past[-1]
        counts = self.world.counts
        here = _Counters(now, *(int(counts[i]) for i in (NEXT, PINNED, REFUSED, FIRSTS, ENDS)))
        self._past.append(here)
        while len(self._past) > 2 and self._past[1].at_s <= now - self.latency_window_s:
            self._past.popleft()
        span = max(1e-9, now - before.at_s)
        refused = here.refused - before.refused
        arrived = here.arrivals - before.arrivals
        prompt, output = self._token_means(before, here)
        waiting, backlog = self._backlog(output)
        return Sample(
            running=0,
            target=0,
            arrivals_per_s=max(0, arrived - refused) / span,
            refused_per_s=refused / span,
            prompt_tokens=prompt,
            output_tokens=output,
            waiting=waiting,
            backlog_tokens=backlog,
            loads=self._loads(),
            class_shares=_pinned_share(here.pinned - before.pinned, arrived),
            **self._latencies(here),
        )

    def _token_means(self, before: _Counters, here: _Counters) -> tuple[float | None, float | None]:
        """Of the prompts that arrived and the answers that ended since the tick before.

        Without any, those of the last time that there were some.
        """
        arrived = self.world.requests["prompt"][before.arrivals : here.arrivals]
        ended = self.world.end_log[before.ends : here.ends]
        done = ended[self.world.requests["outcome"][ended] == DONE]
        prompt, output = self._means
        self._means = (
            float(arrived.mean()) if len(arrived) else prompt,
            float(self.world.requests["output"][done].mean()) if len(done) else output,
        )
        return self._means

    def _backlog(self, output: float | None) -> tuple[int, float | None]:
        """Requests without a token and in no batch; output tokens still to come, by the mean."""
        alive = (self.world.replicas["status"] == READY) | (
            self.world.replicas["status"] == DRAINING
        )
        held = int(self.world.counts[HELD])
        waiting = held + int(self.world.replicas["waiting"][alive].sum())
        running = int(self.world.replicas["running"][alive].sum())
        # A running sequence is half way through, in the mean.
        return waiting, None if output is None else (waiting + running / 2) * output

    def _loads(self) -> tuple[ReplicaLoad, ...]:
        replicas = self.world.replicas
        here = replicas[replicas["status"] == READY]
        middle = here["step_s"] + here["growth_s"] * (here["steps"] - 1) / 2
        fields = [here[name] for name in ("running", "waiting", "rows", "steps")]
        columns: list[list[Any]] = [field.tolist() for field in (*fields, middle)]
        return tuple(
            ReplicaLoad(running=r, waiting=w, step_s=s, positions=p)
            if steps
            else ReplicaLoad(running=r, waiting=w)
            for r, w, p, steps, s in zip(*columns, strict=True)
        )

    def _latencies(self, here: _Counters) -> dict[str, float | None]:
        oldest = self._past[0]
        firsts = self.world.first_log[oldest.firsts : here.firsts]
        waits = self.world.requests["first_s"][firsts] - self.world.requests["arrival_s"][firsts]
        ends = self.world.end_log[oldest.ends : here.ends]
        paces = token_times(self.world.requests, ends[self.world.requests["outcome"][ends] == DONE])
        return {
            "ttft_p90_s": _p90(waits[~np.isnan(waits)]),
            "time_per_token_p90_s": _p90(paces[paces > 0]),
        }


def token_times(requests: Records, index: Ints) -> np.ndarray:
    """Seconds per token after the first one; 0 for answers of one token."""
    more = requests["output"][index] - 1
    return (requests["end_s"][index] - requests["first_s"][index]) / np.maximum(1, more)


def _p90(values: np.ndarray) -> float | None:
    if not len(values):
        return None
    place = min(len(values) - 1, int(0.9 * len(values)))
    return float(np.partition(values, place)[place])


def _pinned_share(pinned: int, arrived: int) -> dict[str, float]:
    return {PINNED_CLASS: pinned / arrived} if pinned and arrived else {}
