"""Protection in Serve's proxy, which holds the connections; nothing is checked before it.

Serve's proxy is uvicorn, which accepts heads of any length and waits for them for ever. It also
obeys headers of its own, which clients have no right to set. It loads `middlewares` because the
environment names it (`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`). It does not know the job, so the
ingress states in a header of each stream how long a client may take to read.
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
# With these headers a client could extend its time limit, keep its request running after it has
# left, or choose among replicas.
_OF_SERVE = (
    b"x-request-timeout-seconds",
    b"x-request-disconnect-disabled",
    b"serve-multiplexed-model-id",
)


# What uvicorn's `send` is a method of.
_CYCLES = (httptools_impl.RequestResponseCycle, h11_impl.RequestResponseCycle)


class SlowReaders:
    """ASGI middleware: ends a response of which nothing could be sent within the limit."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit_s: float | None = None

        async def timed(message: Message) -> None:
            nonlocal limit_s
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if LIMIT_HEADER in headers:
                    limit_s = float(headers[LIMIT_HEADER])
                    del headers[LIMIT_HEADER]
            try:
                # `send` waits while the connection's buffers are full.
                await asyncio.wait_for(send(message), limit_s)
            except TimeoutError:
                logger.warning("a client has read nothing for %g s and is dropped", limit_s)
                # Closing the connection would first send what the client does not read.
                cycle = getattr(send, "__self__", None)
                if isinstance(cycle, _CYCLES):
                    cycle.transport.abort()
                raise

        await self._app(scope, receive, timed)


def middlewares() -> list[Middleware]:
    """The middlewares of Serve's proxy, which calls this before its server starts."""
    # uvicorn looks its protocol up here; Serve has no option for it.
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{BoundedProtocol.__name__}"
    return [Middleware(SlowReaders), Middleware(CleanHeaders)]


class CleanHeaders:
    """ASGI middleware: drops headers that Serve obeys, and those that it cannot decode.

    Serve decodes all values as UTF-8, and an invalid one would cause a 500.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if _is_clean(name, value)]
        await self._app({**scope, "headers": headers}, receive, send)


def _is_clean(name: bytes, value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return name.replace(b"_", b"-") not in _OF_SERVE


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on useless bytes and on time.

    The time limit applies to the rest of a head, the first one included. It also applies to the
    rest of a body that is no longer read because the reply has been sent. The job limits the time
    of other bodies (`limits.body_s`).
    """

    # One read may add as much again. Common servers accept 8 to 32 KiB.
    HEAD_BYTES = 65536
    OWED_S = 10.0

    _owed: asyncio.TimerHandle | None = None
    _is_whole = True  # whether the last request has arrived completely
    _gets_on = False
    _futile_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._owe()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._gets_on = False
        super().data_received(data)
        # Heads, trailers, chunk extensions: bytes that complete no head and are no part of a body.
        self._futile_bytes = 0 if self._gets_on else self._futile_bytes + len(data)
        if self._futile_bytes > self.HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
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
            # This is the next request on the connection; it is not read while one is answered.
            self._owe()
        else:
            self.transport.close()
