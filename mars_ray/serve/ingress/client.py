"""The replicas of a model, as the HTTP routes see them.

Requests survive the loss of a replica as long as their client has received nothing of an answer.
Another replica gives the same answer, because all open settings, the seed included, were decided
before.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from mars_ray.config.serve import ServeJob
from mars_ray.serve.openai.request_models import ApiError
from mars_ray.serve.protocol import (
    Envelope,
    ErrorInfo,
    GenerationRequest,
    Message,
    Tokenized,
    TokenizeRequest,
    Used,
)
from mars_ray.serve.status import Decided, ReplicaStatus
from mars_ray.serve.threshold_actor import newest_decision

logger = logging.getLogger(__name__)

# A replica that takes longer than this to report that it is ready counts as not ready.
_READY_S = 5.0
# Replicas are not asked for their status more often than this, however many pages are open.
_STATUS_S = 0.5
_STATUS_TIMEOUT_S = 2.0
# What a request has used is known at its engine's next step; an engine whose steps take longer than
# this counts as stuck.
_USED_TIMEOUT_S = 15.0
# One more than the number of replicas that one fault is likely to end.
_TRIES = 3
_PAUSE_S = 0.2
# Time for a living replica to report the deadline itself, because it counts those answers.
_GRACE_S = 1.0
# DeploymentUnavailableError: no replica runs, and those of the newest version do not start.
_GONE = (RayActorError, DeploymentUnavailableError)
_LOST = ErrorInfo(503, "no replica is available; retry", code="replica_lost", retry_after_s=1)
Reply = TypeVar("Reply")
Value = TypeVar("Value")


class TtlCache(Generic[Value]):
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


async def retried(ask: Callable[[], Awaitable[Reply]]) -> Reply:
    """The reply of the first replica that survives long enough. Raises ApiError if none does."""
    for _ in range(_TRIES):
        try:
            return await ask()
        except _GONE:
            await asyncio.sleep(_PAUSE_S)
    raise ApiError(_LOST)


class ReplicaClient:
    """The replicas of one model, behind Serve's handle."""

    def __init__(self, handle: DeploymentHandle, job: ServeJob) -> None:
        self._job = job
        # Sends messages, not Ray objects. Set here because a handle keeps the options of the
        # process that made it, and ignores this process's environment.
        self._handle = handle.options(_by_reference=False)
        self._status = TtlCache(self._asked_for_status, _STATUS_S)
        self._decided = TtlCache(lambda: newest_decision(job.name), _STATUS_S)
        self._streaming = self._handle.options(stream=True)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Message, None]:
        """Yields the messages of the first replica that survives until its first, or a final error.

        The request's time limit counts from here, because there may be no replica to check it.
        """
        limit_s = request.timeout_s
        until = None if limit_s is None else time.monotonic() + limit_s
        for _ in range(_TRIES):
            is_begun = is_over = False
            messages = self._streaming.generate.remote(request)
            assert isinstance(messages, DeploymentResponseGenerator)
            try:
                while not is_over:
                    left_s = None  # of an answer that has begun the replica looks at the clock
                    if until is not None and not is_begun:
                        left_s = until + _GRACE_S - time.monotonic()
                    async with asyncio.timeout(left_s):
                        message = await anext(messages, None)
                    if isinstance(message, ErrorInfo) and message.code == "engine_error":
                        break
                    is_begun = True
                    is_over = not isinstance(message, Envelope) or message.ending is not None
                    if message is not None:
                        yield message
            except _GONE as error:
                logger.warning("request %s: %s", request.id, error)
            except TimeoutError:
                late = f"the answer was not finished within {limit_s:g} s"
                yield ErrorInfo(408, late, param="timeout_s", code="deadline_exceeded")
                return
            finally:
                if not is_over:
                    messages.cancel()
            if is_over:
                return
            if is_begun:
                break
            await asyncio.sleep(_PAUSE_S)
            if until is not None:
                request = replace(request, timeout_s=max(0.0, until - time.monotonic()))
        yield _LOST

    async def tokenize(self, asked: TokenizeRequest) -> Tokenized | ErrorInfo:
        return await retried(lambda: self._handle.tokenize.remote(asked))

    async def detokenize(self, tokens: tuple[int, ...]) -> str | ErrorInfo:
        return await retried(lambda: self._handle.detokenize.remote(tokens))

    async def used(self, request_id: str) -> Used | None:
        """The usage of a closed request; None if nobody knows. All replicas are asked, since nobody
        knows which one had it."""
        try:
            replies = await self._handle.broadcast("used", request_id).results_async(
                timeout_s=_USED_TIMEOUT_S, return_exceptions=True
            )
        except (DeploymentUnavailableError, TimeoutError):
            return None
        return next((reply for reply in replies if isinstance(reply, Used)), None)

    async def is_ready(self) -> bool:
        """Whether a request sent now would be answered."""
        try:
            # A model scaled to zero counts as ready; asking for its health would wake it.
            if self._job.scaling.scale_to_zero and await self._status.get() is None:
                return True
            async with asyncio.timeout(_READY_S):
                return await self._handle.is_ready.remote()
        except Exception:  # noqa: BLE001 - whatever keeps a replica from answering
            return False

    async def status(self) -> Sequence[ReplicaStatus]:
        """The status of each replica that answers."""
        return await self._status.get() or ()

    async def decided(self) -> Decided | None:
        """The latest decision of the autoscaling policy, if one is in charge."""
        return await self._decided.get() if self._job.has_policy else None

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
