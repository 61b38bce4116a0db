"""One thread owns the engine; asyncio code streams from it.

Everything the outside asks for goes through one queue, and is done between two steps.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import TypeVar

from mars_ray.decode.engine import Engine
from mars_ray.decode.isolation import step_apart, works
from mars_ray.decode.request import Completion, Request, TokenEvent
from mars_ray.errors import EngineError, PoisonError, RequestError

Event = TokenEvent | Exception
_log = logging.getLogger(__name__)
_Deliver = Callable[[Event], None]
Answer = TypeVar("Answer")
# Steps that fail one after the other, with none in between that does not: the engine is broken.
_MOST_FAILED_STEPS = 3
# Between two looks whether the thread has ended.
_LOOK_S = 0.05


class Mailbox:
    """One writer on any thread, one reader on the loop it was made on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._some = asyncio.Event()
        self._over = asyncio.Event()
        self._is_awaited = False

    def put(self, event: Event) -> None:
        """An exception and a completion are the last."""
        is_last = isinstance(event, Exception) or event.completion is not None
        self._events.append(event)
        if is_last or self._is_awaited:
            self._is_awaited = False
            # The loop may be closed by the time a last event arrives.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake, is_last)

    async def take(self) -> list[Event]:
        """All there are, at least one."""
        while not self._events:
            self._some.clear()
            self._is_awaited = True
            # The writer may have looked before the flag was up.
            if not self._events:
                await self._some.wait()
        return [self._events.popleft() for _ in range(len(self._events))]

    async def wait_for_the_last(self, seconds: float) -> None:
        """At most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()

    def _wake(self, is_last: bool) -> None:
        self._some.set()
        if is_last:
            self._over.set()


class AsyncEngine:
    """An engine that works by itself. `start` it before use, `stop` it at the end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, _Deliver] = {}
        self._undelivered: list[tuple[_Deliver, Event]] = []
        self._is_unchecked = True  # since the last step
        self._failed_steps = 0  # since the last that did not
        self._stopping = False
        self._closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.last_step_s = time.monotonic()

    @property
    def open_requests(self) -> int:
        """Requests waiting or running."""
        return len(self._listeners)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; requests under way get an EngineError."""
        with contextlib.suppress(EngineError):
            self._command(self._stop)
        self._thread.join(timeout_s)

    def check_health(self, limit_s: float = 30.0) -> None:
        """Raise EngineError if the thread is gone, or has had work for `limit_s` without a step."""
        if not self._thread.is_alive():
            raise EngineError("the engine thread is not running")
        idle_s = time.monotonic() - self.last_step_s
        if self._listeners and idle_s > limit_s:
            raise EngineError(f"the engine has work but has not stepped for {idle_s:.0f} s")

    async def ended(self) -> None:
        """Returns once the thread is gone, whatever for, and its requests have their errors."""
        while self._thread.is_alive():
            await asyncio.sleep(_LOOK_S)

    async def stream(
        self, request: Request, interval_s: float = 0.0
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Events of a request, one per forward: the first at once, then what has come since.

        Not sooner than `interval_s` after the ones before, but for the last, which does not wait.
        Closing the iterator cancels the request. Raises RequestError if the engine refuses it, or
        cannot follow its grammar any further, EngineError if the engine fails.
        """
        mailbox = Mailbox()
        deliver = mailbox.put  # one object, by which `_cancel` knows whose request it is
        self._command(lambda: self._submit(request, deliver))
        try:
            while True:
                taken = await mailbox.take()
                if events := [event for event in taken if not isinstance(event, Exception)]:
                    yield events
                last = taken[-1]
                if isinstance(last, Exception):
                    raise last
                if last.completion:
                    return
                if interval_s:
                    await mailbox.wait_for_the_last(interval_s)
        finally:
            with contextlib.suppress(EngineError):
                self._command(lambda: self._cancel(request.id, deliver))

    async def ask(self, question: Callable[[Engine], Answer]) -> Answer:
        """What the engine's own thread says between two steps.

        Raises what the question raises, and EngineError once the thread has ended.
        """
        answer: concurrent.futures.Future[Answer] = concurrent.futures.Future()

        def reply() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(question(self._engine))
            except Exception as error:  # noqa: BLE001 - a question must not end the thread
                answer.set_exception(error)

        self._command(reply)
        return await asyncio.wrap_future(answer)

    def _command(self, command: Callable[[], None]) -> None:
        """Have the thread do this between two steps. Raises EngineError once it has ended."""
        with self._closing:
            if self._closed:
                raise EngineError("the engine was shut down")
            self._commands.put(command)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                if self._engine.has_work and not self._stopping:
                    self._step()
        except Exception:  # noqa: BLE001 - the edge of the thread; `check_health` tells
            _log.exception("the engine's thread has ended")
        finally:
            self._close()

    def _close(self) -> None:
        """Whatever ended the thread, nobody may be left waiting for it."""
        with self._closing:
            self._closed = True
        try:
            # What was asked before that is done, so that it can be undone like the rest.
            with contextlib.suppress(queue.Empty):
                while True:
                    self._commands.get_nowait()()
        except Exception:  # noqa: BLE001 - the others still have to hear of the end
            _log.exception("a command failed while the engine's thread was ending")
        self._deliver()
        self._fail_all(EngineError("the engine was shut down"))

    def _obey(self) -> None:
        """All commands there are; without work, wait for one."""
        if not self._engine.has_work:
            self._deliver()
            if self._is_unchecked:
                # Once: it looks at every page, and who is idle is asked for numbers all the time.
                self._engine.check_integrity()
                self._is_unchecked = False
            self._commands.get()()
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _step(self) -> None:
        self._is_unchecked = True
        for event in self._stepped():
            deliver = self._listeners[event.request_id]
            if event.completion or event.failure:
                # Its id is free from here on, delivered or not.
                del self._listeners[event.request_id]
            failure = event.failure and _error_of(event.request_id, event.failure)
            self._undelivered.append((deliver, failure or event))
        self.last_step_s = time.monotonic()
        # Where a device leaves the processor free, they go out beside the next forward: no step
        # waits for that, nor for those who then read them.
        if not self._engine.overlaps:
            self._deliver()

    def _deliver(self) -> None:
        undelivered, self._undelivered = self._undelivered, []
        for deliver, event in undelivered:
            deliver(event)

    def _stepped(self) -> Iterable[TokenEvent]:
        """The events of a step, or of one for each sequence alone if all together fail.

        Raises what the step raises once too many have failed.
        """
        try:
            events = self._engine.step(self._deliver)
        except RequestError:
            # No fault of the engine's: a grammar has become too complex on the way.
            return step_apart(self._engine)
        except Exception:
            self._failed_steps += 1
            if self._failed_steps == _MOST_FAILED_STEPS:
                raise
            _log.exception("a step of the engine failed; each of its sequences is tried alone")
            events = step_apart(self._engine)
            # Somebody was to blame, and not the engine: clients repeat what has failed.
            if any(event.failure for event in events) and works(self._engine):
                self._failed_steps = 0
            return events
        self._failed_steps = 0
        return events

    def _submit(self, request: Request, deliver: _Deliver) -> None:
        try:
            self._engine.submit(request)
        except RequestError as error:
            deliver(error)
            return
        except Exception as error:  # noqa: BLE001 - one request must not end the thread
            _log.exception("request %s could not be submitted", request.id)
            deliver(EngineError(f"the engine failed on the request: {type(error).__name__}"))
            return
        if not self._listeners:
            self.last_step_s = time.monotonic()
        self._listeners[request.id] = deliver

    def _cancel(self, request_id: str, deliver: _Deliver) -> None:
        # Another request may have this id: the one that was refused must not end the first.
        if self._listeners.get(request_id) is deliver:
            del self._listeners[request_id]
            self._engine.cancel(request_id)

    def _fail_all(self, error: EngineError) -> None:
        listeners, self._listeners = self._listeners, {}
        # First: what has ended the thread may be in the way of the rest.
        for deliver in listeners.values():
            deliver(error)
        for request_id in listeners:
            try:
                self._engine.cancel(request_id)
            except Exception:  # noqa: BLE001 - the engine is not used any more
                _log.exception("request %s could not be taken away", request_id)

    def _stop(self) -> None:
        self._stopping = True


def _error_of(request_id: str, failure: Exception) -> Exception:
    """What the client learns: where its request went too far, but nothing of faults of ours."""
    if isinstance(failure, RequestError):
        return failure
    _log.error("request %s failed", request_id, exc_info=failure)
    return PoisonError(f"the engine failed on this request: {type(failure).__name__}")


async def complete(engine: AsyncEngine, request: Request) -> Completion:
    """The whole answer at once. Raises as `AsyncEngine.stream`."""
    async for events in engine.stream(request):
        if events[-1].completion:
            return events[-1].completion
    raise EngineError("the engine ended a stream without a completion")
