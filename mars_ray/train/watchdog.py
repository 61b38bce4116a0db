"""A watchdog: when a step takes too long, every rank writes its stacks and ends.

The stacks are written by faulthandler's own thread, which needs no interpreter lock, so it works
while a collective hangs. The process ends a little later, so that all ranks can write. Ray then
starts the group again from the last checkpoint.
"""

import faulthandler
import os
import socket
import threading
import time
from pathlib import Path

_DUMP_S = 0.5  # time to write the stacks
_GRACE_S = 5.0  # time for the other ranks


class Watchdog:
    """Ends the process unless `feed` is called every `timeout_s` seconds; a context manager."""

    def __init__(self, directory: Path, rank: int, timeout_s: float) -> None:
        self._path = directory / f"rank_{rank}.txt"
        self._timeout_s = timeout_s
        self._fed = time.monotonic()
        self._doing = "starting"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a")
        self.feed("starting")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join()
        self._file.close()
        if self._path.stat().st_size == 0:
            self._path.unlink()

    def feed(self, doing: str) -> None:
        """Note what begins now; it may take `timeout_s` seconds."""
        self._fed, self._doing = time.monotonic(), doing
        faulthandler.dump_traceback_later(self._timeout_s, file=self._file)

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._timeout_s)):
            if time.monotonic() < self._fed + self._timeout_s + _DUMP_S:
                continue
            print(
                f"{socket.gethostname()}, process {os.getpid()}: {self._doing} took more than "
                f"{self._timeout_s:g} s",
                file=self._file,
                flush=True,
            )
            if not self._ended.wait(_GRACE_S):
                os._exit(1)


def stacks(directory: Path) -> str:
    """A sentence about the stacks in a directory; empty if there are none."""
    files = [path for path in sorted(directory.glob("rank_*.txt")) if path.stat().st_size]
    if not files:
        return ""
    lines = [line for path in files for line in path.read_text(errors="replace").splitlines()]
    said = next((line for line in lines if "took more than" in line), "a step took too long")
    return (
        f"{said}; where each rank stood is in {', '.join(str(path) for path in files)}. If it "
        "was slow rather than stuck, raise cluster.step_timeout_s"
    )
