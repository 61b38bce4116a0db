"""Requests survive the loss of a replica, as long as their client has seen nothing of an answer.

Another replica says the same: what a request leaves open, its seed too, was decided before.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from mars_ray.serve.openai.request_models import ApiError
from mars_ray.serve.protocol import ErrorInfo, GenerationRequest, Message

logger = logging.getLogger(__name__)

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


async def answered(
    ask: Callable[[GenerationRequest], AsyncGenerator[Message, None]], call: GenerationRequest
) -> AsyncGenerator[Message, None]:
    """The messages of the first replica that lives long enough; else a refusal as the last one.

    What is not to be delivered before it is whole is kept back until then. The call's time runs
    from here: no replica may be there to look at the clock.
    """
    limit_s = call.timeout_s
    until = None if limit_s is None else time.monotonic() + limit_s
    for _ in range(_TRIES):
        told = False
        kept: list[Message] = []
        try:
            async with aclosing(ask(call)) as messages:
                while message := await _next(messages, None if told else until):
                    if _is_broken(message):
                        break
                    if call.is_streamed:
                        told = True
                        yield message
                    else:
                        kept.append(message)
                else:
                    for message in kept:
                        yield message
                    return
        except _GONE as error:
            logger.warning("request %s: %s", call.id, error)
        except TimeoutError:
            yield _late(limit_s)
            return
        if told:
            break
        await asyncio.sleep(_PAUSE_S)
        if until is not None:
            call = replace(call, timeout_s=max(0.0, until - time.monotonic()))
    yield _LOST


async def _next(messages: AsyncGenerator[Message, None], until: float | None) -> Message | None:
    """None at the end. Raises TimeoutError if nothing comes until then and a little longer."""
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
