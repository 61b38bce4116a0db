"""How far reading is, when it takes long."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from mars_ray.progress import Bars

T = TypeVar("T")

_QUIET_S = 2.0
_UPDATE_EVERY = 256


@contextmanager
def counted(items: Iterable[T], label: str) -> Iterator[Iterator[T]]:
    """The items; after two seconds their number is shown on stderr."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description} {task.completed}"),
        TimeElapsedColumn(),
    )
    bars = Bars(Console(stderr=True), *columns, transient=True)
    try:
        yield _counting(items, bars, label)
    finally:
        bars.stop()


def _counting(items: Iterable[T], bars: Bars, label: str) -> Iterator[T]:
    begin = time.monotonic()
    task = bars.add_task(label, total=None)
    for count, item in enumerate(items, start=1):
        yield item
        if count % _UPDATE_EVERY == 0:
            bars.update(task, completed=count)
            if time.monotonic() - begin > _QUIET_S:
                bars.start()
