"""An engine's own thread as others see it: the same for this package's engine and for vLLM's."""

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Several
from typing import Any

from mars_ray.decode.mailbox import Close, Deliver, delivered
from mars_ray.decode.request import Request, TokenEvent
from mars_ray.errors import EngineError

# Interval of checks whether the thread has ended.
_LOOK_S = 0.05


class EngineThread(ABC):
    """A thread that owns an engine and executes commands. `start` it before use, `stop` it at the
    end."""

    def __init__(self) -> None:
        self.last_step_s = time.monotonic()
        self._asked_s = self.last_step_s  # when the oldest waiting command was given
        self._aborted: set[str] = set()  # requests whose streams continue for others
        self._closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    @abstractmethod
    def open_requests(self) -> int:
        """Number of requests that wait or run."""

    @property
    @abstractmethod
    def waiting_commands(self) -> int:
        """Number of commands that the thread has not taken up."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; open requests get an EngineError."""
        with contextlib.suppress(EngineError):
            self._command(self._stop)
        self._thread.join(timeout_s)

    def check_health(self, limit_s: float = 30.0) -> None:
        """Raise EngineError if the thread is gone, or stands still: it has had work for `limit_s`
        without a step, or a command that it did not take up."""
        if not self._thread.is_alive():
            raise EngineError("the engine thread is not running")
        now_s = time.monotonic()
        idle_s = now_s - self.last_step_s
        if self.open_requests and idle_s > limit_s:
            raise EngineError(f"the engine has work but has not stepped for {idle_s:.0f} s")
        deaf_s = min(idle_s, now_s - self._asked_s)
        if self.waiting_commands and deaf_s > limit_s:
            raise EngineError(f"the engine has not taken up a command for {deaf_s:.0f} s")

    async def ended(self) -> None:
        """Return once the thread is gone for any reason, and its requests have their errors."""
        while self._thread.is_alive():
            await asyncio.sleep(_LOOK_S)

    def stream(
        self, *requests: Request, interval_s: float = 0.0
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Events of all the requests, one per forward of each, until every request has its last.

        Closing the iterator cancels unfinished requests. Failures are RequestError if the engine
        refuses the request or cannot follow its grammar any further, EngineError if the engine
        fails. All else is as in `delivered`.
        """
        return delivered(
            requests,
            interval_s,
            lambda deliver: self._command(lambda: self._submit(requests, deliver)),
            lambda deliver, close: self._leave(requests, deliver, close),
            self._aborted,
        )

    @abstractmethod
    def _run(self) -> None:
        """What the thread does."""

    @abstractmethod
    def _command(self, command: Callable[[], Any]) -> None:
        """Let the thread execute this. Raises EngineError once it has ended."""

    def _note_command(self) -> None:
        """Note that a command is about to be given; with the lock of `_closing` held."""
        if not self.waiting_commands:
            self._asked_s = time.monotonic()

    @abstractmethod
    def _stop(self) -> Any:
        """End the thread, on the thread."""

    @abstractmethod
    def _submit(self, requests: Several[Request], deliver: Deliver) -> Any:
        """Submit the requests up to the first that is refused, which ends their stream; on the
        thread."""

    @abstractmethod
    def _leave(self, requests: Several[Request], deliver: Deliver, close: Close) -> None:
        """Forget the requests of a stream that is over or was closed, and count its rest."""
