"""What stands in Serve's proxy, where connections are: before it nothing has been checked.

Serve's proxy is uvicorn, which takes heads of any length and waits for them for ever, and it reads
headers of its own for which strangers have no use. It loads `middlewares` because the environment
names it (`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`), and knows nothing of the job: the ingress
says in a header of each stream how long a client may take to read.
"""

import asyncio
import logging

import uvicorn.config
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http import h11_impl, httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

LIMIT_HEADER = "x-mars-slow-reader-s"
# With them a client could lengthen its time, have its request go on when it has left, or choose
# among replicas.
_OF_SERVE = (
    b"x-request-timeout-seconds",
    b"x-request-disconnect-disabled",
    b"serve-multiplexed-model-id",
)


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
    """Ends the connection at once: closing would first send what the client does not read."""
    cycle = getattr(send, "__self__", None)
    if isinstance(cycle, httptools_impl.RequestResponseCycle | h11_impl.RequestResponseCycle):
        cycle.transport.abort()


def middlewares() -> list[Middleware]:
    """What Serve's proxy puts around everything; it asks before its server starts."""
    # There is no option for it, but this is where the server looks its protocol up.
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{BoundedProtocol.__name__}"
    return [Middleware(SlowReaders), Middleware(CleanHeaders)]


class CleanHeaders:
    """ASGI middleware: leaves out headers that Serve obeys, and those that it cannot decode.

    It takes all values for UTF-8, and one that is not would be a 500.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        headers = [(name, value) for name, value in scope["headers"] if _is_clean(name, value)]
        await self._app({**scope, "headers": headers}, receive, send)


def _is_clean(name: bytes, value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return name.replace(b"_", b"-") not in _OF_SERVE


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP, for clients that get on: bytes that lead nowhere, and time, have an end.

    A client owes the rest of a head, its first one included, and of a body that is not read any
    more because the reply is out. How long other bodies may take, the job says (`limits.body_s`).
    """

    # As much again may come in one read. Common servers take 8 to 32 KiB.
    HEAD_BYTES = 65536
    OWED_S = 10.0

    _owed: asyncio.TimerHandle | None = None
    _is_whole = True  # whether the last request has come to its end
    _gets_on = False
    _futile_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._owe()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._settle()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._gets_on = False
        super().data_received(data)
        # Heads, trailers, extensions of chunks: whatever neither begins a request nor its body.
        self._futile_bytes = 0 if self._gets_on else self._futile_bytes + len(data)
        if self._futile_bytes > self.HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        """See httptools, also for the methods below."""
        super().on_message_begin()
        self._is_whole = False
        self._owe()

    def on_headers_complete(self) -> None:
        self._gets_on = True
        self._settle()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._gets_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._gets_on = self._is_whole = True
        self._settle()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See HttpToolsProtocol."""
        super().on_response_complete()
        if not self._is_whole:
            self._owe()

    def _owe(self) -> None:
        if self._owed is None:
            self._owed = self.loop.call_later(self.OWED_S, self._too_late)

    def _settle(self) -> None:
        if self._owed is not None:
            self._owed.cancel()
            self._owed = None

    def _too_late(self) -> None:
        self._owed = None
        if self.cycle is not None and not self.cycle.response_complete:
            # The next request on this connection; while this one is answered, it is not read.
            self._owe()
        else:
            self.transport.close()
