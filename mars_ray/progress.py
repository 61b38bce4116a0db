"""Progress of a long command: a bar on a terminal, a line every half minute anywhere else.

A submitted job has a log but no terminal; without occasional lines it looks stuck.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn

# Seconds of silence before a line reports the progress.
EVERY_S = 30.0


class Lines:
    """Prints the result of `text`, from start to stop, after every EVERY_S without a line.

    On a terminal it prints only the messages given to `say`.
    """

    def __init__(self, console: Console, text: Callable[[], str]) -> None:
        self._console = console
        self._text = text
        self._begun = time.monotonic()
        self._due = self._begun + EVERY_S
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> "Lines":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the lines; further calls do nothing."""
        if not self._console.is_terminal and not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        """Stops the lines: none comes after this."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def say(self, message: str) -> None:
        """Prints a line at once, and restarts the interval."""
        self._due = time.monotonic() + EVERY_S
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _watch(self) -> None:
        while not self._ended.wait(self._due - time.monotonic()):
            if time.monotonic() >= self._due:
                self.say(f"{self._text()}, {time.monotonic() - self._begun:.0f} s")


class Bars(Progress):
    """rich's bars on a terminal; elsewhere `Lines` about the first unfinished task."""

    def __init__(self, console: Console, *columns: str | ProgressColumn, **options: Any) -> None:
        hidden = not console.is_terminal
        super().__init__(*columns, console=console, disable=hidden, **options)
        self._lines = Lines(console, self._text)

    def start(self) -> None:
        super().start()
        self._lines.start()

    def stop(self) -> None:
        """Hides the bars."""
        super().stop()
        self._lines.stop()

    def say(self, message: str) -> None:
        """Prints a line above the bars."""
        self._lines.say(message)

    def _text(self) -> str:
        tasks = self.tasks
        if not tasks:
            return "starting"
        open_tasks = (t for t in tasks if t.total is None or t.completed < t.total)
        task = next(open_tasks, tasks[-1])
        if task.total is None:
            done = f": {task.completed:,.0f}" if task.completed else ""
            return task.description + done
        return f"{task.description}: {task.completed:,.0f} of {task.total:,.0f}"


def short(path: Path) -> str:
    """The path relative to the working directory if it lies below it, else the path. Hours after a
    command's start that directory may be gone."""
    with suppress(FileNotFoundError, ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
