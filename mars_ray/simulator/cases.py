"""A cell of a simulation, what a run in it needs besides its policy, runs on all cores, and the
policies: ours, a fleet that stays, and Ray Serve's default.

Ray's has the arithmetic of ray 2.60. `serve/autoscaling_policy.py`: the default policy
(`_core_replica_queue_length_policy`), the delays around every policy (`_apply_delay_logic`);
`serve/_private/autoscaling_state.py`: total ongoing requests as the time-weighted mean of the
look-back period; `serve/config.py`: the defaults.
"""

import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from mars_ray.autoscale.policy import Decision, State
from mars_ray.autoscale.sample import Sample
from mars_ray.autoscale.service_model import Level, Mix, ServiceModel, step_rows
from mars_ray.config.scaling import ScalingConfig, Slo
from mars_ray.files import ResultCache
from mars_ray.progress import Bars
from mars_ray.simulator.config import Cluster, PolicyName, Simulation, TraceSource
from mars_ray.simulator.engine.run import EXACT, Deciding, Fixture, Outcome, simulate
from mars_ray.simulator.traces.load import load_trace
from mars_ray.simulator.traces.trace import Trace

# Every fleet begins warm, with so many times what this many seconds of the trace need.
_BEGINNING_S, _SPARE = 120.0, 1.5
_UNWATCHED_S = 5.0
_ALL = slice(None)
_SOURCE: TypeAdapter[TraceSource] = TypeAdapter(TraceSource)


@dataclass(frozen=True, slots=True)
class Cell:
    """A trace in a regime at a cold start."""

    trace: str
    regime: str
    cold_start_s: float

    def __str__(self) -> str:
        return f"{self.trace}, {self.regime}, cold start {self.cold_start_s:g} s"


@dataclass(frozen=True, slots=True)
class Case:
    """A cell with the trace of one seed."""

    config: ScalingConfig  # of the cell: with its SLO and cold start
    model: ServiceModel
    cluster: Cluster
    trace: Trace
    accuracy: float
    seed: int

    @property
    def slo(self) -> Slo:
        return self.config.slo

    def need(self, level: Level) -> float:
        """Replicas, with fractions, that would carry the trace if it came evenly."""
        return self._need(level, _ALL, max(1.0, self.trace.duration_s))

    def begins_with(self, level: Level, least: int) -> int:
        """Replicas that are warm when the run begins: what the beginning needs, with some spare."""
        here = slice(0, int(self.trace.arrival_s.searchsorted(_BEGINNING_S)))
        need = self._need(level, here, _BEGINNING_S)
        return min(max(math.ceil(_SPARE * need), least), self.config.max_replicas)

    def unwatched(self) -> "Case":
        """The case with fewer ticks: without kills, a fleet that never changes needs none. A run
        ends with a tick, so that they cannot be left out."""
        if self.cluster.kills:
            return self
        tick_s = max(self.cluster.tick_s, _UNWATCHED_S)
        return replace(self, cluster=self.cluster.model_copy(update={"tick_s": tick_s}))

    def fixture(self, levels: tuple[Level, ...], set_point: float, replicas: int) -> Fixture:
        """A run's fixture, with so many replicas to begin with."""
        return Fixture(
            trace=self.trace,
            model=self.model,
            cluster=self.cluster,
            levels=levels,
            set_point=set_point,
            replicas=replicas,
            most=max(self.config.max_replicas, replicas),
            seed=self.seed,
            slo=self.slo,
        )

    def mix(self, here: slice = _ALL) -> Mix:
        """The mean request of a part of the trace."""
        trace = self.trace
        return Mix(float(trace.prompt_tokens[here].mean()), float(trace.output_tokens[here].mean()))

    def _need(self, level: Level, here: slice, span_s: float) -> float:
        count = len(self.trace.arrival_s[here])
        if not count:
            return 0.0
        capacity = self.model.capacity(level, self.mix(here), self.slo.time_per_token_s)
        return count / span_s / capacity.requests_per_s


def make_case(job: Simulation, model: ServiceModel, cell: Cell, seed: int) -> Case:
    """The case of this seed. Raises DataError if the trace cannot be read."""
    slo = job.slos[cell.regime]
    cluster = job.cluster_of(cell.trace, cell.cold_start_s)
    rows = cluster.step_tokens or step_rows(model, slo.time_per_token_s)
    changes = {"slo": slo, "cold_start_s": max(1e-3, cell.cold_start_s)}
    return Case(
        config=job.scaling.model_copy(update=changes),
        model=replace(model, step_rows=rows),
        cluster=cluster.model_copy(update={"step_tokens": rows}),
        trace=loaded(job.traces[cell.trace], seed),
        accuracy=job.accuracy,
        seed=seed,
    )


def loaded(source: TraceSource, seed: int) -> Trace:
    """The source's trace. Raises DataError."""
    return _loaded(source.model_dump_json(), seed)


@lru_cache(maxsize=6)
def _loaded(source: str, seed: int) -> Trace:
    """Kept, because consecutive runs have the same trace."""
    return load_trace(_SOURCE.validate_json(source), seed)


def run_parts(
    parts: Mapping[str, Callable[[], Any]], kept: ResultCache, workers: int | None, console: Console
) -> dict[str, Any]:
    """The value of each part, by name and in order; values kept from before are not computed again.

    Workers are processes, at most one per core; parts and values are pickled if there are several.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    open_parts = {name: part for name, part in parts.items() if name not in kept}
    most = min(workers or os.cpu_count() or 1, len(open_parts))
    with Bars(console, *columns) as bars:
        done = len(parts) - len(open_parts)
        task = bars.add_task(next(iter(open_parts), ""), total=len(parts), completed=done)
        in_turn = ((name, part()) for name, part in list(open_parts.items()))
        made = _in_processes(open_parts, most) if most > 1 else in_turn
        for name, value in made:
            kept[name] = value
            del open_parts[name]
            bars.update(task, description=next(iter(open_parts), ""), advance=1)
    return {name: kept[name] for name in parts}


def _in_processes(
    parts: Mapping[str, Callable[[], Any]], workers: int
) -> Iterator[tuple[str, Any]]:
    # Spawned, not forked, because the display of progress has threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _let_die) as pool:
        names = {pool.submit(part): name for name, part in parts.items()}
        under_way, error = set(names), None
        try:
            while under_way:
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    if failed := future.exception():
                        error = error or failed
                        # Those that have begun are finished, so that their values are kept.
                        under_way = {other for other in under_way if not other.cancel()}
                    else:
                        yield names[future], future.result()
            if error:
                raise error
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            # Waits: Python's exit may write to the pipe that the pool's thread is just closing.
            pool.shutdown(cancel_futures=True)
            raise


def _let_die() -> None:
    """Let a worker die without a traceback on Ctrl-C, and whenever the command ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


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
