"""Processes that outlive the command which started them and can be identified safely later."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_LOOK_S = 0.1
# A killed process is gone within moments, even on a busy machine.
_KILLED_S = 10.0


@dataclass(frozen=True, slots=True)
class Process:
    """A process by its number and the tick of the system's clock at which it started.

    Numbers are reused, so the number alone may belong to another process by now.
    """

    pid: int
    started_tick: int

    @property
    def is_alive(self) -> bool:
        """Whether the number still belongs to this process, and it has not ended."""
        seen = _stat(self.pid)
        return seen is not None and seen[0] not in "ZX" and seen[1] == self.started_tick


def start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
    """Starts a process in a session of its own, with both outputs going to the log."""
    with log.open("wb") as output:
        # Its end is read from /proc: a later caller is not its parent.
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
    """Asks the processes to end, waits, and kills the rest, each with its process group."""
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
