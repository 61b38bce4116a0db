"""Between the engine's thread and whoever reads one request's events on an event loop.

To wake a loop costs both sides more than a step of a small model can spare, and every wake-up takes
the interpreter from the engine. So a reader that is busy is not woken, and finds all events at once
when it looks again.
"""

import asyncio
import contextlib
from collections import deque

from mars_ray.decode.request import TokenEvent

Event = TokenEvent | Exception


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
