"""Processes that outlive the command which started them, and are not taken for others later."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_LOOK_S = 0.1
# What is killed is gone within moments, also on a busy machine.
_KILLED_S = 10.0


@dataclass(frozen=True, slots=True)
class Process:
    """A process by its number and the tick of the system's clock at which it started.

    Numbers are used again, so a number alone may be somebody else's process by now.
    """

    pid: int
    started_tick: int

    @property
    def is_alive(self) -> bool:
        """Whether it is still this one, and has not ended."""
        seen = _stat(self.pid)
        return seen is not None and seen[0] not in "ZX" and seen[1] == self.started_tick


def start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
    """Starts a process in a session of its own, both outputs to the log."""
    with log.open("wb") as output:
        # Its end is seen in /proc: whoever asks later is not its parent.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    seen = _stat(child.pid)
    assert seen is not None, "a child is there until it is waited for"
    return Process(child.pid, seen[1])


def end(processes: Iterable[Process], patience_s: float) -> None:
    """Asks them to end, waits, and kills those that have not, each with its process group."""
    asked = [process for process in processes if process.is_alive]
    for process in asked:
        os.kill(process.pid, signal.SIGTERM)
    _wait(asked, patience_s)
    for process in asked:
        if process.is_alive:
            os.killpg(process.pid, signal.SIGKILL)
    _wait(asked, _KILLED_S)


def _wait(processes: Sequence[Process], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while any(process.is_alive for process in processes) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start of a process, or None if there is none: proc(5), fields 3 and 22."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the name in brackets, which may hold anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])
