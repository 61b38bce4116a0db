"""How often an answer crosses from a replica to the client.

A message costs Ray Serve's processes some 2 ms of CPU on its way, more than a step of a small model
takes. So pieces of an answer are put together: the first goes at once, the next not sooner than an
interval after it, with all that has come until then, and the end at once again. A model whose steps
take longer than the interval is not delayed by it.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace

from mars_ray.serve.messages import Message, Piece, Refusal


async def paced(
    messages: AsyncGenerator[Message, None], interval_s: float | None
) -> AsyncGenerator[Message, None]:
    """The same answer in fewer messages; None: nothing between the first and the end.

    Closing the generator closes `messages`.
    """
    held = _Held()
    reading = asyncio.create_task(held.read(messages))
    try:
        while not (held.is_over.is_set() and held.is_empty):
            await held.has_some.wait()
            for message in held.take():
                yield message
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await held.is_over.wait()
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


class _Held:
    """What has come and was not passed on."""

    def __init__(self) -> None:
        self._pieces: dict[int, Piece] = {}  # by choice
        self._refusal: Refusal | None = None
        self.has_some = asyncio.Event()
        self.is_over = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        return not self._pieces and self._refusal is None

    async def read(self, messages: AsyncGenerator[Message, None]) -> None:
        """All of them, to their end."""
        try:
            async with aclosing(messages):
                async for message in messages:
                    self._add(message)
        finally:
            self.is_over.set()
            self.has_some.set()

    def take(self) -> list[Message]:
        """Everything, oldest choice first; a refusal is the last message."""
        taken: list[Message] = [*self._pieces.values()]
        if self._refusal is not None:
            taken.append(self._refusal)
        self._pieces, self._refusal = {}, None
        if not self.is_over.is_set():
            self.has_some.clear()
        return taken

    def _add(self, message: Message) -> None:
        if isinstance(message, Refusal):
            self._refusal = message
        else:
            before = self._pieces.get(message.choice)
            self._pieces[message.choice] = joined(before, message) if before else message
        self.has_some.set()


def joined(first: Piece, second: Piece) -> Piece:
    """Two pieces of one answer as one; it has the forward of the second."""
    return replace(
        second,
        text=first.text + second.text,
        tokens=first.tokens + second.tokens,
        logprobs=first.logprobs + second.logprobs,
        calls=first.calls + second.calls,
    )
