"""Long work in independent parts: on all cores, with progress, and no part done twice."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from mars_ray.files import Kept
from mars_ray.progress import Bars


def run_parts(
    parts: Mapping[str, Callable[[], Any]], kept: Kept, workers: int | None, console: Console
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
        made = _in_processes(open_parts, most) if most > 1 else _in_turn(open_parts)
        for name, value in made:
            kept[name] = value
            del open_parts[name]
            bars.update(task, description=next(iter(open_parts), ""), advance=1)
    return {name: kept[name] for name in parts}


def _in_turn(parts: Mapping[str, Callable[[], Any]]) -> Iterator[tuple[str, Any]]:
    for name, part in list(parts.items()):
        yield name, part()


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
