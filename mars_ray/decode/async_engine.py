"""An engine for asyncio: one thread owns it, and streams deliver its events.

All commands from outside go through one queue, and are executed between two steps.
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
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from mars_ray.decode.engine import Engine
from mars_ray.decode.isolation import step_apart, works
from mars_ray.decode.request import Completion, EngineFacts, Request, TokenEvent
from mars_ray.decode.stats import Snapshot
from mars_ray.errors import EngineError, ModelError, PoisonError, RequestError
from mars_ray.model.draft_adapter import DraftAdapter, read_draft_adapter
from mars_ray.model.stop import stop_ids

_log = logging.getLogger(__name__)
_Deliver = Callable[[TokenEvent], None]
Answer = TypeVar("Answer")
# The engine counts as broken after this many consecutive failed steps.
_MOST_FAILED_STEPS = 3
# Interval of checks whether the thread has ended.
_LOOK_S = 0.05


class Mailbox:
    """Events of some requests: one writer on any thread, one reader on the loop it was made on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[TokenEvent] = deque()
        self._woken = asyncio.Event()
        self._is_awaited = False
        # Counts of requests' first and last events; each count is changed by one side only.
        self._urgent_put = self._urgent_taken = 0
        self._discard: Callable[[int], None] | None = None

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
            # The loop may be closed by the time a last event arrives.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._woken.set)

    def close(self, discard: Callable[[int], None]) -> None:
        """The reader is gone: `discard` gets the number of tokens of what is here and still comes.
        Only the writer may call it."""
        self._discard = discard
        while self._events:
            discard(len(self._events.popleft().tokens))

    async def take(self) -> list[TokenEvent]:
        """Wait for an event, and return all that are here."""
        while not self._events:
            self._woken.clear()
            self._is_awaited = True
            # The writer may have checked the flag before it was set.
            if not self._events:
                await self._woken.wait()
        taken = [self._events.popleft() for _ in range(len(self._events))]
        self._urgent_taken += sum(map(_is_urgent, taken))
        return taken

    async def pause(self, seconds: float) -> None:
        """Wait for this time, or until a request's first or last event is here."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._urgent_put <= self._urgent_taken:
                    self._woken.clear()
                    await self._woken.wait()


def _is_urgent(event: TokenEvent) -> bool:
    return event.forward == 1 or event.is_last


class AsyncEngine:
    """An engine that runs in a thread. `start` it before use, `stop` it at the end.

    The service uses it as an `EngineClient` (`serve/replica/engine_client.py`).
    """

    def __init__(self, engine: Engine, directory: str | Path | None = None) -> None:
        """`directory` is the model's; draft adapters are checked against it."""
        self._engine = engine
        self._directory = directory
        self._adapter: tuple[str, DraftAdapter] | None = None  # ready, not yet in use
        self.can_draft = engine.card.block_size > 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, _Deliver] = {}
        self._aborted: set[str] = set()  # requests whose streams continue for others
        self._undelivered: list[tuple[_Deliver, TokenEvent]] = []
        self._is_unchecked = True  # no integrity check since the last step
        self._failed_steps = 0  # since the last step that succeeded
        self._discarded_tokens = 0  # of events that nobody has read
        self._stopping = False
        self._closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.last_step_s = time.monotonic()

    @property
    def open_requests(self) -> int:
        """Number of requests that wait or run."""
        return len(self._listeners)

    @property
    def facts(self) -> EngineFacts:
        """Facts that hold for every request. Raises ModelError if answers would never end."""
        model, config = self._engine.model, self._engine.config
        return EngineFacts(
            config.max_context, config.max_batch, model.config.vocab_size, stop_ids(model)
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; open requests get an EngineError."""
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
        """Return once the thread is gone for any reason, and its requests have their errors."""
        while self._thread.is_alive():
            await asyncio.sleep(_LOOK_S)

    async def stream(
        self, *requests: Request, interval_s: float = 0.0
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Events of all the requests, one per forward of each, until every request has its last.

        Events are yielded at most every `interval_s`, together with all that came in the meantime;
        only a request's first and last event do not wait. Closing the iterator cancels unfinished
        requests. An event with a failure is yielded, and then its failure is raised before any
        later event: RequestError if the engine refuses the request or cannot follow its grammar any
        further, EngineError if the engine fails.
        """
        mailbox = Mailbox()
        deliver = mailbox.put  # one object, by which `_cancel` recognises the request's stream
        arrived: list[TokenEvent] = []
        self._command(lambda: self._submit(requests, deliver))
        try:
            unfinished = len(requests)
            while True:
                arrived = await mailbox.take()
                while arrived:
                    failures = (end for end, event in enumerate(arrived, start=1) if event.failure)
                    end = next(failures, len(arrived))
                    events, arrived = arrived[:end], arrived[end:]
                    yield events
                    last = events[-1]
                    if last.failure and last.request_id not in self._aborted:
                        raise last.failure
                    unfinished -= sum(event.is_last for event in events)
                if unfinished <= 0:
                    return
                if interval_s:
                    await mailbox.pause(interval_s)
        finally:
            self._aborted.difference_update(request.id for request in requests)
            unread = sum(len(event.tokens) for event in arrived)
            with contextlib.suppress(EngineError):
                self._command(lambda: self._leave(requests, mailbox, deliver, unread))

    async def abort(self, request_id: str) -> None:
        """End a request of a stream that continues for the others. Only events that are already on
        their way still come, and their failures are not raised. Raises EngineError once the engine
        has ended."""
        self._aborted.add(request_id)
        self._command(lambda: self._abort(request_id))

    async def set_threshold(self, threshold: float) -> None:
        """Set the threshold of requests that tolerate it, from the next step on."""

        def change(engine: Engine) -> None:
            engine.thresholds.set_point = threshold

        await self.ask(change)

    async def snapshot(self) -> Snapshot:
        """The engine's state between two steps."""

        def seen(engine: Engine) -> Snapshot:
            return replace(engine.snapshot(), discarded_tokens=self._discarded_tokens)

        return await self.ask(seen)

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Make a draft adapter ready for use; it replaces the one made ready before.

        Raises ModelError if it cannot be read or does not fit the model.
        """
        dtype = self._engine.model.dtype
        adapter = await asyncio.to_thread(read_draft_adapter, directory, self._directory, dtype)
        await self.ask(lambda engine: engine.check_adapter(adapter))
        self._adapter = name, adapter

    async def use_adapter(self, name: str | None) -> None:
        """Let the adapter made ready last make drafts from the next step on; with None, the model
        itself, if it was trained to. Raises ModelError, and then nothing has changed."""
        ready, self._adapter = self._adapter, None
        adapter = None
        if name is not None:
            if ready is None or ready[0] != name:
                raise ModelError(f"draft adapter {name} is not ready: load it first")
            adapter = ready[1]
        # Set just before the engine is asked. Requests submitted earlier reach it first, with
        # drafts; requests submitted later are in a form that the next step can decode.
        before = self.can_draft
        self.can_draft = adapter is not None or self._engine.drafts_itself
        try:
            await self.ask(lambda engine: engine.set_adapter(adapter, name))
        except ModelError:
            self.can_draft = before
            raise

    async def ask(self, question: Callable[[Engine], Answer]) -> Answer:
        """The engine's answer, computed by its own thread between two steps.

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
        """Let the thread execute this between two steps. Raises EngineError once it has ended."""
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
        except Exception:  # noqa: BLE001 - the edge of the thread; `check_health` reports it
            _log.exception("the engine's thread has ended")
        finally:
            self._close()

    def _close(self) -> None:
        """End all requests: whatever ended the thread, no client may wait for it any longer."""
        with self._closing:
            self._closed = True
        try:
            # Execute earlier commands too, so that their requests can be ended like the rest.
            with contextlib.suppress(queue.Empty):
                while True:
                    self._commands.get_nowait()()
        except Exception:  # noqa: BLE001 - the other clients must still learn of the end
            _log.exception("a command failed while the engine's thread was ending")
        self._deliver()
        self._fail_all(EngineError("the engine was shut down"))

    def _obey(self) -> None:
        """Execute all waiting commands; without work, wait for one."""
        if not self._engine.has_work:
            self._deliver()
            if self._is_unchecked:
                # Once only: it checks every page, and an idle engine is polled for numbers often.
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
            if event.is_last:
                # The id is free from here on, whether the event is delivered or not.
                del self._listeners[event.request_id]
            if event.failure:
                event = replace(event, failure=_error_of(event.request_id, event.failure))
            self._undelivered.append((deliver, event))
        self.last_step_s = time.monotonic()
        # If the device leaves the processor free, events are delivered during the next forward: no
        # step waits for the delivery, nor for the readers.
        if not self._engine.overlaps:
            self._deliver()

    def _deliver(self) -> None:
        undelivered, self._undelivered = self._undelivered, []
        for deliver, event in undelivered:
            deliver(event)

    def _stepped(self) -> Iterable[TokenEvent]:
        """The events of a step, or if it fails, of a step for each sequence alone.

        Raises the step's error once too many steps have failed.
        """
        try:
            events = self._engine.step(self._deliver)
        except RequestError:
            # The engine is not to blame: a grammar has become too complex during the answer.
            return step_apart(self._engine)
        except Exception:
            self._failed_steps += 1
            if self._failed_steps == _MOST_FAILED_STEPS:
                raise
            _log.exception("a step of the engine failed; each of its sequences is tried alone")
            events = step_apart(self._engine)
            # A request was to blame and not the engine; clients repeat failed requests.
            if any(event.failure for event in events) and works(self._engine):
                self._failed_steps = 0
            return events
        self._failed_steps = 0
        return events

    def _submit(self, requests: Iterable[Request], deliver: _Deliver) -> None:
        """Submit the requests up to the first that is refused, which ends their stream."""
        if not self._listeners:
            self.last_step_s = time.monotonic()
        for request in requests:
            try:
                self._engine.submit(request)
            except RequestError as error:
                deliver(_failed(request.id, error))
                return
            except Exception as error:  # noqa: BLE001 - one request must not end the thread
                _log.exception("request %s could not be submitted", request.id)
                what = f"the engine failed on the request: {type(error).__name__}"
                deliver(_failed(request.id, EngineError(what)))
                return
            self._listeners[request.id] = deliver

    def _leave(
        self, requests: Iterable[Request], mailbox: Mailbox, deliver: _Deliver, unread: int
    ) -> None:
        """End what is left of a stream, and count what nobody has read of it."""
        self._cancel(requests, deliver)
        self._discard(unread)
        mailbox.close(self._discard)

    def _discard(self, tokens: int) -> None:
        self._discarded_tokens += tokens

    def _cancel(self, requests: Iterable[Request], deliver: _Deliver) -> None:
        for request in requests:
            # Another request may have this id: a refused request must not end that one.
            if self._listeners.get(request.id) is deliver:
                self._abort(request.id)

    def _abort(self, request_id: str) -> None:
        if self._listeners.pop(request_id, None):
            self._engine.cancel(request_id)

    def _fail_all(self, error: EngineError) -> None:
        listeners, self._listeners = self._listeners, {}
        # First, because the cause of the thread's end may make the rest fail.
        for request_id, deliver in listeners.items():
            deliver(_failed(request_id, error))
        for request_id in listeners:
            try:
                self._engine.cancel(request_id)
            except Exception:  # noqa: BLE001 - the engine is not used any more
                _log.exception("request %s could not be taken away", request_id)

    def _stop(self) -> None:
        self._stopping = True


def _failed(request_id: str, failure: Exception) -> TokenEvent:
    """The last event of a request that never entered the engine, or leaves it with an error."""
    return TokenEvent(request_id, (), 0, failure=failure)


def _error_of(request_id: str, failure: Exception) -> Exception:
    """The error for a client: details if its request was at fault, none of internal errors."""
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
