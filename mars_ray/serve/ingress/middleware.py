"""Middleware around the routes: the gate that drains an ingress, and the log of requests; the
limits of bodies; the page and its files.

The log has one JSON line for each finished request, without prompts unless the job asks for them.
"""

import asyncio
import json
import logging
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from mars_ray.config.serve import Limits
from mars_ray.serve.openai.request_models import ApiError
from mars_ray.serve.openai.sse import error_body, internal_error
from mars_ray.serve.protocol import ErrorInfo, GenerationRequest, Message, Turn, Used

FILES = "/page"
PAGE = Path(__file__).with_name("page")
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
# The page may use only its own files and this server; nothing may make HTML or scripts of text.
_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'self'; script-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


async def index_page() -> Response:
    """The page, which needs no key: it holds no data and asks for the key itself."""
    text = (PAGE / "index.html").read_text("utf-8")
    return HTMLResponse(text, headers=_HEADERS | {"Content-Security-Policy": _POLICY})


class PageFiles(StaticFiles):
    """The scripts and styles, which browsers ask for anew: an update changes all or none."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS | {"Cache-Control": "no-cache"})
        return response


logger = logging.getLogger(__name__)
request_logger = logging.getLogger("mars_ray.requests")

# The time until another process answers on this address, or a load balancer looks elsewhere.
_RETRY_AFTER_S = 5
# Paths of health checks and scrapers, which pass the gate uncounted.
_ALWAYS_OPEN = ("/healthz", "/readyz", "/health", "/ping", "/metrics")
_CLOSED = ErrorInfo(503, "the service is stopping; try again later", code="draining")
_ID_CHARS = 128
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._:@/+=-]")
# Paths that are polled every few seconds, whose log lines would be noise.
_NOT_LOGGED = ("/", *_ALWAYS_OPEN)
# And beginnings of those that the page polls or loads: logged if they are refused.
_LOGGED_IF_REFUSED = ("/v1/mars/status", FILES + "/")


@dataclass(slots=True)
class Gate:
    """Lets requests in until it is closed for good; those inside are still served."""

    is_open: bool = True
    inside: int = 0  # requests whose last byte has not been sent


class DrainMiddleware:
    """Counts the requests inside the gate, and refuses new ones once it is closed."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _ALWAYS_OPEN:
            await self._app(scope, receive, send)
        elif self._gate.is_open:
            self._gate.inside += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._gate.inside -= 1
        else:
            headers = {"Retry-After": str(_RETRY_AFTER_S)}
            refused = JSONResponse(error_body(_CLOSED), _CLOSED.status, headers)
            await refused(scope, receive, send)


@dataclass(slots=True)
class RequestLog:
    """The facts about a request so far; times are seconds since its arrival."""

    request_id: str | None  # the client's, or its proxy's
    method: str
    path: str
    id: str | None = None  # id of the reply
    key: str | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    model: str | None = None
    replica: str | None = None  # whose tokens these are
    mode: str | None = None
    status: int | None = None  # HTTP status; None if the client left before it
    ending: str | None = None  # stop, length, tool_calls, abort, or an error's code
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these
    completion_tokens: int = 0
    forwards: int = 0
    disagreed: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0
    prompt: Any = None
    is_settled: bool = False
    started_s: float = field(default_factory=time.monotonic)

    def sent(self, request: GenerationRequest, *, with_prompt: bool) -> None:
        """Notes that the request was valid and goes to a replica."""
        self.mode, self.model, self.ending = request.mode.type, request.reply.model, "abort"
        if with_prompt:
            self.prompt = [
                prompt
                if isinstance(prompt, str)
                else [
                    {"role": part.role, "content": part.content} if isinstance(part, Turn) else part
                    for part in prompt
                ]
                for prompt in request.prompts
            ]

    def on_message(self, message: Message) -> None:
        if isinstance(message, ErrorInfo):
            self.ending = message.code
            if message.used is not None:
                self.count(message.used, is_last=True)
            return
        if self.first_token_s is None:
            self.first_token_s = self._elapsed_s
        self.mode = message.mode or self.mode
        # While an answer is unfinished, the client may still leave.
        self.ending = message.ending or self.ending
        self.count(message.used, is_last=message.ending is not None)

    def count(self, used: Used, *, is_last: bool) -> None:
        """Takes the replica's counts so far, or of the whole request."""
        self.is_settled = is_last
        self.prompt_tokens, self.cached_tokens = used.prompt_tokens, used.cached_tokens
        self.completion_tokens = used.completion_tokens
        self.forwards, self.disagreed = used.forwards, used.disagreed
        self.replica = used.replica or self.replica

    def line(self) -> str:
        """All this as JSON, without empty fields."""
        self.total_s = self._elapsed_s
        values = asdict(self)
        del values["is_settled"], values["started_s"]
        shown = {name: value for name, value in values.items() if value is not None}
        return json.dumps({"time": datetime.now(UTC).isoformat()} | shown, ensure_ascii=False)

    @property
    def _elapsed_s(self) -> float:
        return round(time.monotonic() - self.started_s, 4)


class LogMiddleware:
    """Writes a line into the log for every request, of which `observe` is told, too; and answers
    for what has failed unexpectedly."""

    def __init__(self, app: ASGIApp, observe: Callable[[RequestLog], None] | None = None) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id") or ""
        # Without characters that could break a line, a shell or a dashboard.
        request_id = _NOT_IN_ID.sub("_", given[:_ID_CHARS]) or None
        log = RequestLog(request_id, scope["method"], scope["path"])
        scope.setdefault("state", {})["log"] = log

        async def look(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                log.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, look)
        except Exception:
            if log.status is not None or log.id is None:
                raise
            logger.exception("request %s failed", log.id)
            error = internal_error(log.id)
            log.ending = error.code
            await JSONResponse(error_body(error), error.status)(scope, receive, look)
        finally:
            is_refused = log.status is not None and log.status >= 400
            is_noise = log.path.startswith(_LOGGED_IF_REFUSED) and not is_refused
            if not is_noise and log.path not in _NOT_LOGGED:
                request_logger.info(log.line())
            if self._observe:
                self._observe(log)


def write_to(path: str | None) -> None:
    """Make this process write its lines to the path, or to standard output."""
    file = WatchedFileHandler(path, encoding="utf-8") if path else logging.StreamHandler(sys.stdout)
    file.setFormatter(logging.Formatter("%(message)s"))
    request_logger.addHandler(file)
    request_logger.setLevel(logging.INFO)
    request_logger.propagate = False


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body. Raises ApiError."""
    message = f"the body has more than {limits.body_bytes} bytes, this server's limit"
    too_large = ApiError(ErrorInfo(413, message, code="body_too_large"))
    # The HTTP parser has checked that it is a number.
    if int(request.headers.get("content-length", "0")) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_s:g} s"
        raise ApiError(ErrorInfo(408, message, code="body_too_slow")) from None
    return bytes(body)
