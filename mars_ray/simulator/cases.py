"""A cell of a simulation, what a run in it needs besides its policy, and runs on all cores."""

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from mars_ray.autoscale.service_model import Level, Mix, ServiceModel, step_rows
from mars_ray.config.scaling import ScalingConfig, Slo
from mars_ray.files import ResultCache
from mars_ray.progress import Bars
from mars_ray.simulator.config import Cluster, Simulation, TraceSource
from mars_ray.simulator.engine.run import Fixture
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
        """What is owed to a request."""
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
        try:
            for future in as_completed(names):
                yield names[future], future.result()
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            # Waits: Python's exit may write to the pipe that the pool's thread is just closing.
            pool.shutdown(cancel_futures=True)
            raise


def _let_die() -> None:
    """Let a worker die without a traceback on Ctrl-C, and whenever the command ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
