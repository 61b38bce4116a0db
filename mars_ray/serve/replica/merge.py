"""Several answers to one call, as one stream."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

from mars_ray.serve.protocol import OutputDelta


async def merged(
    answers: Sequence[AsyncGenerator[OutputDelta, None]],
) -> AsyncGenerator[OutputDelta, None]:
    """The pieces of all answers as they come; the first failure ends them all."""
    if len(answers) == 1:
        async with aclosing(answers[0]) as pieces:
            async for piece in pieces:
                yield piece
        return
    queue: asyncio.Queue[OutputDelta | Exception | None] = asyncio.Queue()

    async def forward(pieces: AsyncGenerator[OutputDelta, None]) -> None:
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    queue.put_nowait(piece)
        except Exception as error:  # noqa: BLE001 - raised again by whoever reads the queue
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(forward(pieces)) for pieces in answers]
    try:
        open_answers = len(tasks)
        while open_answers:
            match await queue.get():
                case None:
                    open_answers -= 1
                case Exception() as error:
                    raise error
                case piece:
                    yield piece
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Once no task runs any more."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
