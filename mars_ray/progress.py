"""How far a long command is: a bar on a terminal, a line every half minute anywhere else.

A submitted job has a log and no terminal; without a line now and then it looks stuck.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn

# Seconds of silence before a line says how far it is.
EVERY_S = 30.0


class Lines:
    """Says what `text` returns, from start to stop, whenever nothing was said for EVERY_S.

    On a terminal it only says what it is told to.
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
        """Starts the lines, once however often it is called."""
        if not self._console.is_terminal and not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        """Ends it: no line comes after this."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def say(self, message: str) -> None:
        """Prints a line at once; the next one is that much later."""
        self._due = time.monotonic() + EVERY_S
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _watch(self) -> None:
        while not self._ended.wait(self._due - time.monotonic()):
            if time.monotonic() >= self._due:
                self.say(f"{self._text()}, {time.monotonic() - self._begun:.0f} s")


class Bars(Progress):
    """rich's bars on a terminal; elsewhere the first unfinished task, as `Lines` say it."""

    def __init__(self, console: Console, *columns: str | ProgressColumn, **options: Any) -> None:
        hidden = not console.is_terminal
        super().__init__(*columns, console=console, disable=hidden, **options)
        self._lines = Lines(console, self._text)

    def start(self) -> None:
        """Shows the bars."""
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
    """The path relative to where the command runs, if it lies below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
