"""A model's replicas, as the HTTP routes see them.

Requests survive the loss of a replica, as long as their client has seen nothing of an answer.
Another replica says the same: what a request leaves open, its seed too, was decided before.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from mars_ray.config.serve import ServeJob
from mars_ray.serve.openai.request_models import ApiError
from mars_ray.serve.protocol import ErrorInfo, GenerationRequest, Message, Prompt, Tokenized
from mars_ray.serve.status import Decided, ReplicaStatus
from mars_ray.serve.threshold_actor import newest_decision

logger = logging.getLogger(__name__)

# A replica that takes longer to say that it is ready, is not.
_READY_S = 5.0
# However many pages are open, replicas are not asked more often.
_STATUS_S = 0.5
_STATUS_TIMEOUT_S = 2.0
# One more than the replicas that one fault is likely to take.
_TRIES = 3
_PAUSE_S = 0.2
# A replica that lives is to say itself that time is over: it counts those answers.
_GRACE_S = 1.0
# The second where no replica runs and those of the newest version do not start.
_GONE = (RayActorError, DeploymentUnavailableError)
_LOST = ErrorInfo(
    503,
    "the replica that was to answer is lost, or there is none; ask again",
    code="replica_lost",
    retry_after_s=1,
)
Reply = TypeVar("Reply")
Value = TypeVar("Value")


class Recent(Generic[Value]):
    """What `ask` said at most `fresh_s` seconds ago; it is never asked twice at the same time."""

    def __init__(self, ask: Callable[[], Awaitable[Value]], fresh_s: float) -> None:
        self._ask = ask
        self._fresh_s = fresh_s
        self._lock = asyncio.Lock()
        self._known: tuple[float, Value] | None = None

    async def get(self) -> Value:
        """The value, from now or from before. Raises what `ask` raises."""
        async with self._lock:
            now = time.monotonic()
            if self._known is None or now - self._known[0] > self._fresh_s:
                self._known = (now, await self._ask())
            return self._known[1]


async def _next(messages: AsyncIterator[Message], until: float | None) -> Message | None:
    """The next message, or None at the end. Raises TimeoutError a little after `until`."""
    left_s = None if until is None else until + _GRACE_S - time.monotonic()
    async with asyncio.timeout(left_s):
        return await anext(messages, None)


async def insisted(ask: Callable[[], Awaitable[Reply]]) -> Reply:
    """The reply of the first replica that lives long enough. Raises ApiError if none does."""
    for _ in range(_TRIES):
        try:
            return await ask()
        except _GONE:
            await asyncio.sleep(_PAUSE_S)
    raise ApiError(_LOST)


def _late(limit_s: float | None) -> ErrorInfo:
    assert limit_s is not None, "a request without a limit cannot be late"
    message = f"the answer was not finished within {limit_s:g} s"
    return ErrorInfo(408, message, param="timeout_s", code="deadline_exceeded")


def _is_broken(message: Message) -> bool:
    """Whether the replica lives, but not its engine."""
    return isinstance(message, ErrorInfo) and message.code == "engine_error"


class ReplicaClient:
    """The backend behind a handle: one model's replicas."""

    def __init__(self, handle: DeploymentHandle, job: ServeJob) -> None:
        self._job = job
        # Messages, not Ray's objects. A handle has the options of the process that made it, so this
        # one's environment has no say.
        self._handle = handle.options(_by_reference=False)
        self._status = Recent(self._asked_for_status, _STATUS_S)
        self._decided = Recent(lambda: newest_decision(job.name), _STATUS_S)
        self._streaming = self._handle.options(stream=True)

    async def generate(self, call: GenerationRequest) -> AsyncGenerator[Message, None]:
        """The messages of the first replica that lives long enough; else an error as the last one.

        What is not to be delivered before it is whole is kept back until then. The call's time runs
        from here: no replica may be there to look at the clock.
        """
        limit_s = call.timeout_s
        until = None if limit_s is None else time.monotonic() + limit_s
        for _ in range(_TRIES):
            is_told = is_over = False
            kept: list[Message] = []
            messages = self._streaming.generate.remote(call)
            assert isinstance(messages, DeploymentResponseGenerator)
            try:
                while message := await _next(messages, None if is_told else until):
                    if _is_broken(message):
                        break
                    if call.is_streamed:
                        is_told = True
                        yield message
                    else:
                        kept.append(message)
                else:
                    is_over = True
            except _GONE as error:
                logger.warning("request %s: %s", call.id, error)
            except TimeoutError:
                yield _late(limit_s)
                return
            finally:
                if not is_over:
                    messages.cancel()
            if is_over:
                for message in kept:
                    yield message
                return
            if is_told:
                break
            await asyncio.sleep(_PAUSE_S)
            if until is not None:
                call = replace(call, timeout_s=max(0.0, until - time.monotonic()))
        yield _LOST

    async def tokenize(self, prompt: Prompt) -> Tokenized | ErrorInfo:
        return await insisted(lambda: self._handle.tokenize.remote(prompt))

    async def detokenize(self, tokens: tuple[int, ...]) -> str | ErrorInfo:
        return await insisted(lambda: self._handle.detokenize.remote(tokens))

    async def is_ready(self) -> bool:
        try:
            # A model at zero answers when it is asked; to ask it for its health would wake it.
            if self._job.scaling.scale_to_zero and await self._status.get() is None:
                return True
            return await asyncio.wait_for(self._asked(), _READY_S)
        except Exception:  # noqa: BLE001 - whatever keeps a replica from answering
            return False

    async def _asked(self) -> bool:
        return await self._handle.is_ready.remote()

    async def status(self) -> Sequence[ReplicaStatus]:
        return await self._status.get() or ()

    async def decided(self) -> Decided | None:
        return await self._decided.get() if self._job.replicas == "auto" else None

    async def _asked_for_status(self) -> Sequence[ReplicaStatus] | None:
        """The status of the replicas that answer, or None where there are no replicas at all."""
        try:
            replies = await self._handle.broadcast("status").results_async(
                timeout_s=_STATUS_TIMEOUT_S, return_exceptions=True
            )
        except DeploymentUnavailableError:
            return None
        except TimeoutError:
            return ()
        return [reply for reply in replies if isinstance(reply, ReplicaStatus)]
