"""The part of a simulated cluster that a real controller could observe.

It includes counters, queues and latencies of requests that got their first token or ended. It does
not include the trace, the tokens that a running request will generate, or the true service model.
"""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from mars_ray.autoscale.sample import PINNED as PINNED_CLASS
from mars_ray.autoscale.sample import SLOW, ReplicaLoad, Sample
from mars_ray.config.scaling import Slo
from mars_ray.simulator.config import Cluster
from mars_ray.simulator.engine.arrays import (
    DONE,
    DRAINING,
    ENDS,
    FIRSTS,
    HELD,
    NEXT,
    OPEN,
    PINNED,
    READY,
    REFUSED,
    STARTING,
    Ints,
    Records,
    World,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed(Sample):
    """A sample with additional metrics that only the baselines use."""

    ttft_p90_s: float | None = None
    time_per_token_p90_s: float | None = None
    backlog_tokens: int | None = None  # prompt tokens of requests without a first token


# Requests that follow the set-point.
OPEN_CLASS = "open"
# Before the first metrics arrive.
_NOTHING = Observed(running=0, target=0)


@dataclass(frozen=True, slots=True)
class _Counters:
    """Totals from the beginning to one moment."""

    at_s: float = 0.0
    arrivals: int = 0
    pinned: int = 0
    refused: int = 0
    firsts: int = 0
    ends: int = 0


class Observer:
    """Takes a sample each tick and returns the newest that is old enough."""

    def __init__(self, world: World, cluster: Cluster, slo: Slo) -> None:
        self.world, self.cluster, self.slo = world, cluster, slo
        self._past = deque([_Counters()])
        self._samples: deque[tuple[float, Observed]] = deque()
        self._means: tuple[float | None, float | None] = (None, None)
        self._oldest = 0  # all requests before it have a first token, or have ended
        self._done_5R = np.zeros((5, len(world.replicas)))  # as `_counted`

    def sample(self, now: float, target: int, cold_start_s: float | None) -> Observed:
        """The controller's sample: its target and replicas are current, metrics come late."""
        if now > self._past[-1].at_s:
            # Nothing is measured at time 0: a request there would have an infinite rate.
            self._samples.append((now, self._measure(now)))
        newest_s = now - self.cluster.metrics_lag_s + 1e-9
        while len(self._samples) > 1 and self._samples[1][0] <= newest_s:
            self._samples.popleft()
        at_s, measured = self._samples[0] if self._samples else (now, _NOTHING)
        if at_s > newest_s:
            measured = _NOTHING
        starting = self.world.replicas["status"] == STARTING
        ages_s = now - self.world.replicas["born_s"][starting]
        return replace(
            measured,
            running=int(np.count_nonzero(self.world.replicas["status"] == READY)),
            target=target,
            starting_ages_s=tuple(sorted(ages_s.tolist(), reverse=True)),
            cold_start_s=cold_start_s,
            age_s=now - at_s if measured.arrivals_per_s is not None else None,
        )

    def _measure(self, now: float) -> Observed:
        before = self._past[-1]
        counts = self.world.counts
        here = _Counters(now, *(int(counts[i]) for i in (NEXT, PINNED, REFUSED, FIRSTS, ENDS)))
        self._past.append(here)
        while len(self._past) > 2 and self._past[1].at_s <= now - self.cluster.latency_window_s:
            self._past.popleft()
        span = now - before.at_s
        refused = here.refused - before.refused
        arrived = here.arrivals - before.arrivals
        prompt, output = self._token_means(before, here)
        requests, oldest = self.world.requests, self._past[0]
        # Times to first tokens, and per token after them, over the window.
        firsts = self.world.first_log[oldest.firsts : here.firsts]
        waits = requests["first_s"][firsts] - requests["arrival_s"][firsts]
        ends = self.world.end_log[oldest.ends : here.ends]
        paces = token_times(requests, ends[requests["outcome"][ends] == DONE])
        in_time = self._in_time(before, here)
        replicas = self.world.replicas
        alive = (replicas["status"] == READY) | (replicas["status"] == DRAINING)
        pinned = here.pinned - before.pinned
        return Observed(
            running=0,
            target=0,
            arrivals_per_s=max(0, arrived - refused) / span,
            refused_per_s=refused / span,
            prompt_tokens=prompt,
            output_tokens=output,
            # Without a token and in no batch.
            waiting=int(counts[HELD]) + int(replicas["waiting"][alive].sum()),
            loads=self._loads(now),
            started=in_time[0],
            slow=in_time[1],
            late=in_time[2],
            wall_s=now,
            class_shares={PINNED_CLASS: pinned / arrived} if pinned and arrived else {},
            ttft_p90_s=_percentile_90(waits[~np.isnan(waits)]),
            backlog_tokens=self._backlog(),
            time_per_token_p90_s=_percentile_90(paces[paces > 0]),
        )

    def _token_means(self, before: _Counters, here: _Counters) -> tuple[float | None, float | None]:
        """Mean tokens of prompts that arrived and of answers that ended since the last tick.

        If there were none, the last known means.
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

    def _in_time(self, before: _Counters, here: _Counters) -> list[dict[str, float]]:
        """Rates by class of the requests that started since the last tick, and of those that were
        found slow and late."""
        requests, slo, span_s = self.world.requests, self.slo, here.at_s - before.at_s
        firsts = self.world.first_log[before.firsts : here.firsts]
        ends = self.world.end_log[before.ends : here.ends]
        ends = ends[requests["outcome"][ends] == DONE]
        wait, waited = (
            (requests["first_s"][index] - requests["arrival_s"][index] + self.cluster.overhead_s)
            / slo.ttft_s
            for index in (firsts, ends)
        )
        pace = token_times(requests, ends) / slo.time_per_token_s
        pins = np.concatenate([requests["pins"][firsts], requests["pins"][ends]])
        rates = [_by_class(requests["pins"][firsts], span_s)]
        for limit in (SLOW, 1.0):
            # What was above the limit by its first token was counted then.
            found = np.concatenate([wait > limit, (pace > limit) & (waited <= limit)])
            rates.append(_by_class(pins[found], span_s))
        return rates

    def _backlog(self) -> int:
        """Prompt tokens of requests that have come and have no first token yet."""
        come = self.world.requests[self._oldest : self.world.counts[NEXT]]
        open_ = np.isnan(come["first_s"]) & (come["outcome"] == OPEN)
        self._oldest += int(open_.argmax()) if open_.any() else len(come)
        return int(come["prompt"][open_].sum())

    def _loads(self, now: float) -> tuple[ReplicaLoad, ...]:
        """Each replica's load: means of its steps since the last tick, as from an engine's
        counters, and `positions` of the newest steps."""
        replicas = self.world.replicas
        done_5R = self._counted(now)
        more_5R = done_5R - self._done_5R
        # The counters of a new replica in the same place began at 0.
        more_5R = np.where(more_5R[0] < 0, done_5R, more_5R)
        self._done_5R = done_5R
        here = np.flatnonzero(replicas["status"] == READY)
        fields = [replicas[name][here].tolist() for name in ("running", "rows")]
        return tuple(
            ReplicaLoad(
                running=running,
                step_s=seconds / steps if steps > 0 else None,
                decode_rows=decoded / steps if steps > 0 else None,
                prompt_rows=prompts / prompt_steps if prompt_steps > 0 else None,
                prompt_share=prompt_steps / steps if steps > 0 else None,
                positions=rows or None,
            )
            for running, rows, steps, seconds, decoded, prompt_steps, prompts in zip(
                *fields, *more_5R[:, here].tolist(), strict=True
            )
        )

    def _counted(self, now: float) -> np.ndarray:
        """Steps, busy seconds, decoded rows, steps with prompts and their rows, for every place.

        They include those of the current segment.
        """
        replicas = self.world.replicas
        middle = replicas["step_s"] + replicas["growth_s"] * (replicas["steps"] - 1) / 2
        gone = np.where(replicas["steps"] > 0, now - replicas["start_s"], 0.0)
        part = np.where(replicas["steps"] > 0, gone / np.maximum(middle, 1e-12), 0.0)
        return np.stack(
            [
                replicas["all_steps"] + part,
                replicas["busy_s"] + gone,
                replicas["decode_rows"] + part * replicas["decoding"] * replicas["rows"],
                replicas["prompt_steps"] + part * (replicas["chunk"] > 0),
                replicas["prompt_rows"] + part * replicas["chunk"],
            ]
        )


def token_times(requests: Records, index: Ints) -> np.ndarray:
    """Seconds per token after the first one; 0 for answers of one token."""
    more = requests["output"][index] - 1
    return (requests["end_s"][index] - requests["first_s"][index]) / np.maximum(1, more)


def _percentile_90(values: np.ndarray) -> float | None:
    if not len(values):
        return None
    place = min(len(values) - 1, int(0.9 * len(values)))
    return float(np.partition(values, place)[place])


def _by_class(pins: np.ndarray, span_s: float) -> dict[str, float]:
    """Rates of the requests that pin their threshold, and of the others."""
    pinned = int(pins.sum())
    counts = {PINNED_CLASS: pinned, OPEN_CLASS: len(pins) - pinned}
    return {name: count / span_s for name, count in counts.items() if count}
