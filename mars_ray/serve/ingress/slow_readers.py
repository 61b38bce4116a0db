"""Drops clients that do not read what they asked for.

It has to stand where the connection is: in Serve's proxy (serve/ingress/proxy.py), which knows
nothing of the job. So the ingress says in a header of each stream how long a client may take.
"""

import asyncio
import logging

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http import h11_impl, httptools_impl

logger = logging.getLogger(__name__)

LIMIT_HEADER = "x-mars-slow-reader-s"


class SlowReaders:
    """ASGI middleware: ends a response of which nothing could be sent for so long."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        limit_s: float | None = None

        async def timed(message: Message) -> None:
            nonlocal limit_s
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if LIMIT_HEADER in headers:
                    limit_s = float(headers[LIMIT_HEADER])
                    del headers[LIMIT_HEADER]
            try:
                # It waits for as long as the connection's buffers are full.
                await asyncio.wait_for(send(message), limit_s)
            except TimeoutError:
                logger.warning("a client has read nothing for %g s and is dropped", limit_s)
                _hang_up(send)
                raise

        await self._app(scope, receive, timed)


def _hang_up(send: Send) -> None:
    """Without waiting for the client: closing would first send what it does not read."""
    cycle = getattr(send, "__self__", None)
    if isinstance(cycle, httptools_impl.RequestResponseCycle | h11_impl.RequestResponseCycle):
        cycle.transport.abort()
