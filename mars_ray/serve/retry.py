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

from mars_ray.serve.bodies import ApiError
from mars_ray.serve.messages import Call, Message, Refusal

logger = logging.getLogger(__name__)

# One more than the replicas that one fault is likely to take.
_TRIES = 3
_PAUSE_S = 0.2
_LOST = Refusal(
    503, "the replica that was to answer is lost; ask again", code="replica_lost", retry_after_s=1
)
Reply = TypeVar("Reply")


async def answered(
    ask: Callable[[Call], AsyncGenerator[Message, None]], call: Call
) -> AsyncGenerator[Message, None]:
    """The messages of the first replica that lives long enough; else a refusal as the last one.

    What is not to be delivered before it is whole is kept back until then.
    """
    until = None if call.timeout_s is None else time.monotonic() + call.timeout_s
    for _ in range(_TRIES):
        told = False
        kept: list[Message] = []
        try:
            async with aclosing(ask(call)) as messages:
                async for message in messages:
                    if _is_broken(message):
                        break
                    if call.delivery == "whole":
                        kept.append(message)
                    else:
                        told = True
                        yield message
                else:
                    for message in kept:
                        yield message
                    return
        except RayActorError as error:
            logger.warning("request %s: %s", call.id, error)
        if told:
            break
        await asyncio.sleep(_PAUSE_S)
        if until is not None:
            call = replace(call, timeout_s=max(0.0, until - time.monotonic()))
    yield _LOST


async def insisted(ask: Callable[[], Awaitable[Reply]]) -> Reply:
    """The reply of the first replica that lives long enough. Raises ApiError if none does."""
    for _ in range(_TRIES):
        try:
            return await ask()
        except RayActorError:
            await asyncio.sleep(_PAUSE_S)
    raise ApiError(_LOST)


def _is_broken(message: Message) -> bool:
    """Whether the replica lives, but not its engine."""
    return isinstance(message, Refusal) and message.code == "engine_error"
