"""A model's replicas, as the HTTP routes see them.

Requests survive the loss of a replica as long as their client has received nothing of an answer.
Another replica gives the same answer, because all open settings, the seed included, were decided
before.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from mars_ray.config.serve import ServeJob
from mars_ray.errors import ClusterError
from mars_ray.serve.openai.request_models import ApiError
from mars_ray.serve.protocol import (
    ErrorInfo,
    GenerationRequest,
    Message,
    Tokenized,
    TokenizeRequest,
    Used,
)
from mars_ray.serve.status import Decided, ReplicaStatus
from mars_ray.serve.threshold_actor import learnt, newest_decision, relearn

logger = logging.getLogger(__name__)

# A replica that takes longer than this to report that it is ready counts as not ready.
_READY_S = 5.0
# Replicas are not asked for their status more often than this, however many pages are open.
_STATUS_S = 0.5
_STATUS_TIMEOUT_S = 2.0
# What a call has used is known at its engine's next step; an engine whose steps take longer than
# this counts as stuck.
_USED_TIMEOUT_S = 60.0
# One more than the number of replicas that one fault is likely to end.
_TRIES = 3
_PAUSE_S = 0.2
# Time for a living replica to report the deadline itself, because it counts those answers.
_GRACE_S = 1.0
# DeploymentUnavailableError: no replica runs, and those of the newest version do not start.
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
    """Caches the result of `ask` for `fresh_s` seconds, and never runs two calls at once."""

    def __init__(self, ask: Callable[[], Awaitable[Value]], fresh_s: float) -> None:
        self._ask = ask
        self._fresh_s = fresh_s
        self._lock = asyncio.Lock()
        self._known: tuple[float, Value] | None = None

    async def get(self) -> Value:
        """The value, cached or new. Raises what `ask` raises."""
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
    """The reply of the first replica that survives long enough. Raises ApiError if none does."""
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
    """Whether the replica is alive, but its engine is not."""
    return isinstance(message, ErrorInfo) and message.code == "engine_error"


class ReplicaClient:
    """The backend of one model: its replicas behind a handle."""

    def __init__(self, handle: DeploymentHandle, job: ServeJob) -> None:
        self._job = job
        # Sends messages, not Ray objects. Set here because a handle keeps the options of the
        # process that made it, and ignores this process's environment.
        self._handle = handle.options(_by_reference=False)
        self._status = Recent(self._asked_for_status, _STATUS_S)
        self._decided = Recent(lambda: newest_decision(job.name), _STATUS_S)
        self._streaming = self._handle.options(stream=True)

    async def generate(self, call: GenerationRequest) -> AsyncGenerator[Message, None]:
        """Yields the messages of the first replica that survives long enough, else a final error.

        An answer that must be delivered whole is held back until it is. The call's time limit
        counts from here, because there may be no replica to check it.
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

    async def tokenize(self, asked: TokenizeRequest) -> Tokenized | ErrorInfo:
        return await insisted(lambda: self._handle.tokenize.remote(asked))

    async def detokenize(self, tokens: tuple[int, ...]) -> str | ErrorInfo:
        return await insisted(lambda: self._handle.detokenize.remote(tokens))

    async def used(self, call_id: str) -> Used | None:
        """See Backend. All replicas are asked, since nobody knows which one had the call."""
        try:
            replies = await self._handle.broadcast("used", call_id).results_async(
                timeout_s=_USED_TIMEOUT_S, return_exceptions=True
            )
        except (DeploymentUnavailableError, TimeoutError):
            return None
        return next((reply for reply in replies if isinstance(reply, Used)), None)

    async def is_ready(self) -> bool:
        try:
            # A model scaled to zero counts as ready; asking for its health would wake it.
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

    async def learnt(self) -> str | None:
        with self._policy():
            return await learnt(self._job.name)

    async def relearn(self, memory: str | None) -> None:
        with self._policy():
            await relearn(self._job.name, memory)

    @contextmanager
    def _policy(self) -> Iterator[None]:
        """For questions to the policy's actor. Raises ApiError if it does not answer."""
        try:
            yield
        except ClusterError as error:
            lost = ErrorInfo(503, str(error), code="policy_lost", retry_after_s=1)
            raise ApiError(lost) from error

    async def _asked_for_status(self) -> Sequence[ReplicaStatus] | None:
        """The status of the replicas that answer, or None if there are no replicas."""
        try:
            replies = await self._handle.broadcast("status").results_async(
                timeout_s=_STATUS_TIMEOUT_S, return_exceptions=True
            )
        except DeploymentUnavailableError:
            return None
        except TimeoutError:
            return ()
        return [reply for reply in replies if isinstance(reply, ReplicaStatus)]
