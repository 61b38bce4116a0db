"""An engine's own thread as others see it, and the way of its events to the loop of those who
asked: the same for this package's engine and for vLLM's."""

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Any

from mars_ray.decode.request import Request, TokenEvent
from mars_ray.errors import EngineError

Deliver = Callable[[TokenEvent], None]
# Gets numbers of tokens that nobody has read.
Discard = Callable[[int], None]
# Gives what a stream leaves unread, and what still comes, to a Discard.
Close = Callable[[Discard], None]


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
        self._thread.start()

    def stop(self) -> None:
        """End the thread; open requests get an EngineError."""
        with contextlib.suppress(EngineError):
            self._command(self._stop)
        self._thread.join(timeout=10)

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
            await asyncio.sleep(0.05)

    def stream(
        self, *requests: Request, interval_s: float = 0.0
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Events of all the requests, one per forward of each, until every request has its last.

        Closing the iterator cancels unfinished requests. Failures are RequestError if the engine
        refuses the request or cannot follow its grammar any further, EngineError if the engine
        fails. All else is as in `RequestOutputCollector.stream`.
        """
        return RequestOutputCollector().stream(
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
    def _submit(self, requests: Sequence[Request], deliver: Deliver) -> Any:
        """Submit the requests up to the first that is refused, which ends their stream; on the
        thread."""

    @abstractmethod
    def _leave(self, requests: Sequence[Request], deliver: Deliver, close: Close) -> None:
        """Forget the requests of a stream that is over or was closed, and count its rest."""


class RequestOutputCollector:
    """Events of some requests: one writer on any thread, and one reader, which is a stream."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # the reader's
        self._events: deque[TokenEvent] = deque()
        self._woken = asyncio.Event()
        self._is_awaited = False
        # Counts of requests' first and last events; each count is changed by one side only.
        self._urgent_put = self._urgent_taken = 0
        self._discard: Discard | None = None

    def put(self, event: TokenEvent) -> None:
        """Add an event, which wakes a waiting reader; a first or last one also ends a pause."""
        if self._discard:
            self._discard(len(event.tokens))
            return
        is_urgent = _is_urgent(event)
        self._events.append(event)
        self._urgent_put += is_urgent
        if is_urgent or self._is_awaited:
            self._is_awaited = False
            assert self._loop, "requests are submitted by their stream"
            # The loop may be closed by the time a last event arrives.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._woken.set)

    async def stream(
        self,
        requests: Sequence[Request],
        interval_s: float,
        submit: Callable[[Deliver], None],
        cancel: Callable[[Deliver, Close], None],
        aborted: Collection[str],
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Submits the requests when the first events are requested, and yields events until each
        request has had its last; in the end `cancel` gets the same function as `submit`, and
        another that the engine's thread calls to learn how many tokens were not read.

        Events are yielded at most every `interval_s`, together with all that came in the meantime;
        only a request's first and last event do not wait. An event with a failure is yielded, and
        then its failure is raised before any later event, unless its request is among the aborted
        ones.
        """
        self._loop = asyncio.get_running_loop()
        deliver = self.put  # one object, by which an engine recognises the requests' stream
        arrived: list[TokenEvent] = []
        submit(deliver)
        try:
            unfinished = len(requests)
            while True:
                while not self._events:
                    self._woken.clear()
                    self._is_awaited = True
                    # The writer may have checked the flag before it was set.
                    if not self._events:
                        await self._woken.wait()
                arrived = [self._events.popleft() for _ in range(len(self._events))]
                self._urgent_taken += sum(map(_is_urgent, arrived))
                while arrived:
                    failures = (end for end, event in enumerate(arrived, start=1) if event.failure)
                    end = next(failures, len(arrived))
                    events, arrived = arrived[:end], arrived[end:]
                    yield events
                    last = events[-1]
                    if last.failure and last.request_id not in aborted:
                        raise last.failure
                    unfinished -= sum(event.is_last for event in events)
                if unfinished <= 0:
                    return
                if interval_s:
                    await self._pause(interval_s)
        finally:
            unread = sum(len(event.tokens) for event in arrived)

            def close(discard: Discard) -> None:
                """Give the numbers of tokens of what is here, and still comes; for the writer."""
                self._discard = discard
                discard(unread)
                while self._events:
                    discard(len(self._events.popleft().tokens))

            cancel(deliver, close)

    async def _pause(self, seconds: float) -> None:
        """Wait for this time, or until a request's first or last event is here."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._urgent_put <= self._urgent_taken:
                    self._woken.clear()
                    await self._woken.wait()


def failed(request_id: str, failure: Exception) -> TokenEvent:
    """The last event of a request that never entered the engine, or leaves it with an error."""
    return TokenEvent(request_id, (), 0, failure=failure)


def _is_urgent(event: TokenEvent) -> bool:
    return event.forward == 1 or event.is_last
