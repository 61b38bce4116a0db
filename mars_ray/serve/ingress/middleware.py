"""Middleware around the routes: the gate that drains an ingress, and the log of requests.

The log has one JSON line for each finished request, without prompts unless the job asks for them.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_ray.serve.ingress.page_files import FILES
from mars_ray.serve.openai.replies import error_body
from mars_ray.serve.protocol import ErrorInfo, GenerationRequest, OutputDelta, Turn, Used

logger = logging.getLogger("mars_ray.requests")

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


class Gate:
    """Lets requests in until it is closed for good, and counts those inside."""

    def __init__(self) -> None:
        self._inside = 0
        self._is_open = True

    @property
    def inside(self) -> int:
        """Number of requests whose last byte has not been sent."""
        return self._inside

    @property
    def is_open(self) -> bool:
        """Whether new requests are accepted."""
        return self._is_open

    def close(self) -> None:
        """Refuse new requests from now on; those inside are still served."""
        self._is_open = False

    def around(self, app: ASGIApp) -> ASGIApp:
        """The app behind this gate."""

        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] in _ALWAYS_OPEN:
                await app(scope, receive, send)
                return
            if not self._is_open:
                headers = {"Retry-After": str(_RETRY_AFTER_S)}
                refused = JSONResponse(error_body(_CLOSED), _CLOSED.status, headers)
                await refused(scope, receive, send)
                return
            self._inside += 1
            try:
                await app(scope, receive, send)
            finally:
                self._inside -= 1

        return gated


@dataclass(slots=True)
class Entry:
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
    _choices: int = 1  # to each prompt
    _unfinished: int = 1  # answers in all
    _seen: dict[int, Used] = field(default_factory=dict)  # of each answer
    _is_settled: bool = False
    _started: float = field(default_factory=time.monotonic)

    def called(self, call: GenerationRequest, model: str, *, with_prompt: bool) -> None:
        """Notes that the request was valid and goes to a replica."""
        self.mode, self.model = call.mode.type, model
        self.ending, self._choices, self._unfinished = "abort", call.n, call.choices
        if with_prompt:
            self.prompt = [_readable(prompt) for prompt in call.prompts]

    def told(self, message: OutputDelta | ErrorInfo) -> None:
        """Notes a message of the replica."""
        if isinstance(message, ErrorInfo):
            self.ending = message.code
            if message.used is not None:
                self.settle(message.used)
            return
        if self.first_token_s is None:
            self.first_token_s = self._elapsed_s
        self.replica = message.replica or self.replica
        if finish := message.finish:
            self._unfinished -= 1
            # While an answer is unfinished, the client may still leave.
            if self._unfinished == 0:
                self.ending, self._is_settled = finish.reason, True
            self.mode = finish.mode or self.mode
        self._seen[message.choice] = self._used(message)
        self._count(sum(self._seen.values(), start=Used()))

    @property
    def is_settled(self) -> bool:
        """Whether the counts are the replica's own, and final."""
        return self._is_settled

    def settle(self, used: Used) -> None:
        """Takes the replica's counts of the whole call."""
        self._is_settled = True
        self.replica = used.replica or self.replica
        self._count(used)

    def _used(self, message: OutputDelta) -> Used:
        """What an answer has used: by its finish, or as far as it has come."""
        is_first = message.choice % self._choices == 0  # of its prompt
        finish, seen = message.finish, self._seen.get(message.choice, Used())
        if finish is None:
            prompt_tokens = message.prompt_tokens if is_first else 0
            tokens = seen.completion_tokens + message.tokens
            return Used(prompt_tokens, 0, tokens, message.forward)
        return Used(
            finish.prompt_tokens if is_first else 0,
            finish.cached_tokens if is_first else 0,
            finish.completion_tokens,
            finish.forwards,
            finish.disagreed,
        )

    def _count(self, used: Used) -> None:
        self.prompt_tokens, self.cached_tokens = used.prompt_tokens, used.cached_tokens
        self.completion_tokens = used.completion_tokens
        self.forwards, self.disagreed = used.forwards, used.disagreed

    def line(self) -> str:
        """The entry as JSON, without empty fields."""
        self.total_s = self._elapsed_s
        values = asdict(self).items()
        shown = {name: v for name, v in values if v is not None and not name.startswith("_")}
        return json.dumps({"time": datetime.now(UTC).isoformat()} | shown, ensure_ascii=False)

    @property
    def _elapsed_s(self) -> float:
        return round(time.monotonic() - self._started, 4)


def logged(app: ASGIApp, observe: Callable[[Entry], None] | None = None) -> ASGIApp:
    """The app, with a line in the log for every request, of which `observe` is told, too."""

    async def with_log(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id")
        entry = Entry(_clean(given) if given else None, scope["method"], scope["path"])
        scope.setdefault("state", {})["entry"] = entry

        async def look(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            await app(scope, receive, look)
        finally:
            if _is_logged(entry):
                logger.info(entry.line())
            if observe:
                observe(entry)

    return with_log


def _is_logged(entry: Entry) -> bool:
    if entry.path.startswith(_LOGGED_IF_REFUSED):
        return entry.status is not None and entry.status >= 400
    return entry.path not in _NOT_LOGGED


def entry_of(request: Request) -> Entry:
    """The entry of a request that came through `logged`."""
    return request.state.entry


def write_to(path: str | None) -> None:
    """Make this process write its lines to the path, or to standard output."""
    handler = WatchedFileHandler(path, encoding="utf-8") if path else _to_stdout()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _to_stdout() -> logging.Handler:
    return logging.StreamHandler(sys.stdout)


def _clean(request_id: str) -> str:
    """The id without characters that could break a line, a shell or a dashboard."""
    return _NOT_IN_ID.sub("_", request_id[:_ID_CHARS])


def _readable(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt
    return [
        {"role": part.role, "content": part.content} if isinstance(part, Turn) else part
        for part in prompt
    ]
