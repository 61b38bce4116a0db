"""An engine for asyncio: one thread owns it, and streams deliver its events.

All commands from outside go through one queue, and are executed between two steps.

If a step fails, the sequence that is to blame is searched for (`step_apart`). A step commits
nothing before its forward has succeeded, and a sequence that leaves the batch and returns gives the
same text as one that stays. So all leave, and each takes its next steps alone.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import time
from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode, Mode
from mars_ray.decode.adapter import FusedAdapter
from mars_ray.decode.engine import Engine
from mars_ray.decode.engine_thread import Close, Deliver, EngineThread, failed
from mars_ray.decode.request import EngineFacts, Request, TokenEvent
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.stats import Snapshot
from mars_ray.errors import EngineError, ModelError, PoisonError, RequestError
from mars_ray.model.draft_adapter import read_draft_adapter
from mars_ray.model.load import stop_ids

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
# The engine counts as broken after this many consecutive failed steps.
_MOST_FAILED_STEPS = 3
# A check of every page holds up this process: tens of milliseconds for a large cache.
_CHECK_EVERY_S = 60.0


class AsyncEngine(EngineThread):
    """An engine that runs in a thread. `start` it before use, `stop` it at the end.

    The service uses it as an `EngineClient` (`serve/replica/engine_client.py`).
    """

    def __init__(self, engine: Engine, directory: str | Path | None = None) -> None:
        """`directory` is the model's; draft adapters are checked against it."""
        super().__init__()
        self._engine = engine
        self._directory = directory
        self._adapter: tuple[str, FusedAdapter] | None = None  # ready, not yet in use
        self._has_masks = engine.card.block_size > 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, Deliver] = {}
        self._undelivered: list[tuple[Deliver, TokenEvent]] = []
        self._is_unchecked = True  # no integrity check since the last step
        self._next_check_s = 0.0  # not before this time
        self._failed_steps = 0  # since the last step that succeeded
        self._discarded_tokens = 0  # of events that nobody has read
        self._stopping = False

    def can_decode(self, mode: Mode) -> bool:
        """See EngineClient: `verified` has drafts without masks too (`decode/ngram.py`)."""
        return self._has_masks or not mode.needs_masks

    @property
    def open_requests(self) -> int:
        """Number of requests that wait or run."""
        return len(self._listeners)

    @property
    def waiting_commands(self) -> int:
        """Number of commands that the thread has not taken up."""
        return self._commands.qsize()

    @property
    def facts(self) -> EngineFacts:
        """Facts that hold for every request. Raises ModelError if answers would never end."""
        model, config = self._engine.model, self._engine.config
        return EngineFacts(
            config.context, config.max_batch, model.config.vocab_size, stop_ids(model)
        )

    def _leave(self, requests: abc.Sequence[Request], deliver: Deliver, close: Close) -> None:
        """Forget the requests of a stream that is over or was closed, and count its rest."""
        self._aborted.difference_update(request.id for request in requests)

        def leave() -> None:
            for request in requests:
                # Another request may have this id: a refused request must not end that one.
                if self._listeners.get(request.id) is deliver:
                    self._abort(request.id)
            close(self._discard)

        with contextlib.suppress(EngineError):
            self._command(leave)

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
        return await self.ask(
            lambda engine: replace(engine.snapshot(), discarded_tokens=self._discarded_tokens)
        )

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Make a draft adapter ready for use; it replaces the one made ready before.

        Raises ModelError if it cannot be read or does not fit the model.
        """
        dtype = self._engine.model.dtype
        adapter = await asyncio.to_thread(read_draft_adapter, directory, self._directory, dtype)
        self._adapter = name, await self.ask(lambda engine: engine.fitting(adapter))

    async def use_adapter(self, name: str | None) -> None:
        """Let the adapter made ready last make drafts from the next step on; with None, the model
        itself, if it was trained to. Raises ModelError, and then nothing has changed."""
        ready = self._adapter
        adapter = ready[1] if ready and ready[0] == name else None
        if name is not None and adapter is None:
            raise ModelError(f"draft adapter {name} is not ready: load it first")
        self._adapter = None
        # Set just before the engine is asked. Requests submitted earlier reach it first, with
        # drafts; requests submitted later are in a form that the next step can decode.
        self._has_masks = adapter is not None or self._engine.drafts_itself
        await self.ask(lambda engine: engine.set_adapter(adapter, name))

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
            self._note_command()
            self._commands.put(command)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._process_input_queue()
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
        listeners, self._listeners = self._listeners, {}
        # First, because the cause of the thread's end may make the rest fail.
        for request_id, deliver in listeners.items():
            deliver(failed(request_id, EngineError("the engine was shut down")))
        for request_id in listeners:
            try:
                self._engine.cancel(request_id)
            except Exception:  # noqa: BLE001 - the engine is not used any more
                _log.exception("request %s could not be taken away", request_id)

    def _process_input_queue(self) -> None:
        """Execute all waiting commands; without work, wait for one."""
        if not self._engine.has_work:
            self._deliver()
            self._check()
            self._commands.get()()
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _check(self) -> None:
        """Assert what must hold without work; of every page seldom, and while nobody waits."""
        self._engine.check_idle()
        now_s = time.monotonic()
        if self._is_unchecked and now_s >= self._next_check_s and self._commands.empty():
            self._engine.check_integrity()
            self._is_unchecked, self._next_check_s = False, now_s + _CHECK_EVERY_S

    def _step(self) -> None:
        self._is_unchecked = True
        for event in self._stepped():
            deliver = self._listeners[event.request_id]
            if event.is_last:
                # The id is free from here on, whether the event is delivered or not.
                del self._listeners[event.request_id]
            if event.failure and not isinstance(event.failure, RequestError):
                # Clients are told details if their request was at fault, none of internal errors.
                _log.error("request %s failed", event.request_id, exc_info=event.failure)
                what = f"the engine failed on this request: {type(event.failure).__name__}"
                event = replace(event, failure=PoisonError(what))
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

    def _submit(self, requests: Iterable[Request], deliver: Deliver) -> None:
        """Submit the requests up to the first that is refused, which ends their stream."""
        if not self._listeners:
            self.last_step_s = time.monotonic()
        for request in requests:
            try:
                self._engine.submit(request)
            except RequestError as error:
                deliver(failed(request.id, error))
                return
            except Exception as error:  # noqa: BLE001 - one request must not end the thread
                _log.exception("request %s could not be submitted", request.id)
                what = f"the engine failed on the request: {type(error).__name__}"
                deliver(failed(request.id, EngineError(what)))
                return
            self._listeners[request.id] = deliver

    def _discard(self, tokens: int) -> None:
        self._discarded_tokens += tokens

    def _abort(self, request_id: str) -> None:
        if self._listeners.pop(request_id, None):
            self._engine.cancel(request_id)

    def _stop(self) -> None:
        self._stopping = True


def step_apart(engine: Engine) -> list[TokenEvent]:
    """The events of each sequence's next steps without the others, including failures.

    Afterwards all sequences that have neither failed nor ended are back in their order. Those that
    were not near the batch had no part in the failure and are not tried.
    """
    suspects = engine.config.max_batch
    everybody = engine.set_aside()
    turns = {sequence.request.id: sequence.order for sequence in everybody}
    events, staying = [], everybody[suspects:]
    for sequence in everybody[:suspects]:
        events += _alone(engine, sequence)
        staying = [*engine.set_aside(), *staying]
    for sequence in sorted(staying, key=lambda sequence: turns[sequence.request.id]):
        engine.take_back(sequence)
    return events


def works(engine: Engine) -> bool:
    """Whether the engine can decode a token of a test prompt alone; all sequences come back.

    This distinguishes a broken engine from faulty requests.
    """
    everybody, written = engine.set_aside(), engine.totals.output_tokens
    probe = Request("probe", (0,), ExactMode(), Sampling(), 1, frozenset())
    try:
        engine.submit(probe)
        said = engine.step()
        return bool(said and said[0].completion)
    except Exception:  # noqa: BLE001 - whatever it is, it is not the requests' fault
        return False
    finally:
        engine.cancel(probe.id)
        engine.totals.output_tokens = written  # the probe's token is nobody's
        for sequence in everybody:
            engine.take_back(sequence)


def _alone(engine: Engine, sequence: Sequence) -> list[TokenEvent]:
    """The events of a sequence's next two steps that commit tokens. The first has to compute its
    prompt again, and only the second prepares a sequence that is already running."""
    engine.take_back(sequence)
    events = []
    try:
        while engine.has_work and len(events) < 2:
            events += engine.step()
    except Exception as error:  # noqa: BLE001 - whatever it is, this sequence is to blame
        engine.cancel(sequence.request.id)
        events.append(TokenEvent(sequence.request.id, (), sequence.forwards, failure=error))
    return events
