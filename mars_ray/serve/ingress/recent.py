"""A value that many ask for and that is found out now and then."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """What `ask` said at most `fresh_s` seconds ago; it is never asked twice at the same time."""

    def __init__(self, ask: Callable[[], Awaitable[Value]], fresh_s: float) -> None:
        self._ask = ask
        self._fresh_s = fresh_s
        self._lock = asyncio.Lock()
        self._known: tuple[float, Value] | None = None

    async def get(self) -> Value:
        """Raises what `ask` raises."""
        async with self._lock:
            now = time.monotonic()
            if self._known is None or now - self._known[0] > self._fresh_s:
                self._known = (now, await self._ask())
            return self._known[1]
