"""A progress bar for what takes long, when somebody looks."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

T = TypeVar("T")

_QUIET_S = 2.0
_UPDATE_EVERY = 256


@contextmanager
def counted(items: Iterable[T], label: str) -> Iterator[Iterator[T]]:
    """The items; after two seconds, if stderr is a terminal, their number is shown on it."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description} {task.completed}"),
        TimeElapsedColumn(),
    )
    hidden = not sys.stderr.isatty()
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, transient=True, disable=hidden)
    try:
        yield _counting(items, progress, label)
    finally:
        progress.stop()


def _counting(items: Iterable[T], progress: Progress, label: str) -> Iterator[T]:
    begin = time.monotonic()
    task = progress.add_task(label, total=None)
    for count, item in enumerate(items, start=1):
        yield item
        if count % _UPDATE_EVERY == 0:
            progress.update(task, completed=count)
            if time.monotonic() - begin > _QUIET_S:
                progress.start()
