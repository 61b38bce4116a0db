"""The HTTP API: routes, limits and errors, over any backend."""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from contextvars import Context
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from mars_ray import __version__
from mars_ray.config.serve import ServeJob
from mars_ray.serve.ingress.auth import ApiKey, ApiKeys
from mars_ray.serve.ingress.client import ReplicaClient
from mars_ray.serve.ingress.metrics import Names, metrics_reply
from mars_ray.serve.ingress.middleware import (
    FILES,
    PAGE,
    DrainMiddleware,
    Gate,
    LogMiddleware,
    PageFiles,
    RequestLog,
    index_page,
    read_body,
)
from mars_ray.serve.ingress.proxy import LIMIT_HEADER
from mars_ray.serve.openai.openapi import openapi
from mars_ray.serve.openai.request_models import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
)
from mars_ray.serve.openai.response_models import ModelEntry, ModelsReply, TokenizeReply
from mars_ray.serve.openai.responses import ResponsesBody, begun, parse_responses, renamed, to_chat
from mars_ray.serve.openai.sse import DONE, error_body, error_event, internal_error
from mars_ray.serve.openai.validation import to_request, to_tokenize_request
from mars_ray.serve.protocol import ErrorInfo, GenerationRequest, Message
from mars_ray.serve.status import MarsStatusReply, ModelStatus, model_status

logger = logging.getLogger(__name__)

# Where an answer is cut whose length the client leaves open, or sets beyond the limit.
_LENGTH_HEADER = "X-New-Tokens-Limit"
# How like a route a path must be to be meant for it.
_ALIKE = 0.85
# Lets streams reach the client piece by piece through caches and nginx.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def build_api(
    job: ServeJob,
    handles: Mapping[str, ReplicaClient],
    gate: Gate | None = None,
    metrics: Callable[[Names], Awaitable[str]] | None = None,
    observe: Callable[[RequestLog], None] | None = None,
) -> FastAPI:
    """The API of the job's models behind a gate; `handles` are by the models' names.

    `metrics` returns the text of `/metrics` under given names; `observe` is told of each finished
    request.
    """
    gate = gate or Gate()
    routes = _Routes(job, handles, gate, metrics)
    # The generated pages would load their scripts from another site.
    api = FastAPI(title="mars-ray", docs_url=None, redoc_url=None, openapi_url=None)
    for path, route in (
        ("/", index_page),
        ("/healthz", routes.healthz),
        ("/readyz", routes.readyz),
        ("/health", routes.readyz),
        ("/version", routes.version),
        ("/metrics", routes.metrics),
        ("/v1/models", routes.models),
        ("/v1/models/{model:path}", routes.model),
        ("/v1/mars/status", routes.status),
        ("/openapi.json", routes.openapi),
    ):
        api.add_api_route(path, route, methods=["GET"], response_model=None)
    for path, route in (
        ("/v1/chat/completions", routes.chat),
        ("/v1/completions", routes.complete),
        ("/v1/responses", routes.respond),
        ("/tokenize", routes.tokenize),
        ("/detokenize", routes.detokenize),
    ):
        api.add_api_route(path, route, methods=["POST"], response_model=None)
    # One route, so that the header Allow of a 405 names both methods.
    api.add_api_route("/ping", routes.readyz, methods=["GET", "POST"], response_model=None)
    api.mount(FILES, PageFiles(directory=PAGE))
    api.add_exception_handler(ApiError, _api_error)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(ClientDisconnect, _client_left)
    # The middleware added last runs first, so that requests refused by the gate are logged.
    if job.allowed_origins:
        # Keys come in a header, never as cookies.
        api.add_middleware(
            CORSMiddleware,
            allow_origins=job.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", _LENGTH_HEADER],
        )
    api.add_middleware(DrainMiddleware, gate=gate)
    api.add_middleware(LogMiddleware, observe=observe)
    return api


class _Routes:
    def __init__(
        self,
        job: ServeJob,
        handles: Mapping[str, ReplicaClient],
        gate: Gate,
        metrics: Callable[[Names], Awaitable[str]] | None,
    ) -> None:
        self._job, self._jobs, self._handles = job, job.each(), handles
        self._metrics = metrics
        self._gate = gate
        self._keys = ApiKeys(job.keys_file)
        self._started = int(time.time())

    async def healthz(self) -> dict[str, str]:
        return {"status": "ok"}

    async def readyz(self) -> Response:
        """Whether a request would be answered now: 200 or 503."""
        if not self._gate.is_open:
            return JSONResponse({"status": "draining"}, 503)
        ready = all(await asyncio.gather(*(each.is_ready() for each in self._handles.values())))
        status = "ready" if ready else "not ready"
        return JSONResponse({"status": status}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        key = self._holder(request)
        if len(self._allowed(key)) < len(self._jobs):
            message = "this key is not good for all models, and the metrics are those of all"
            raise ApiError(ErrorInfo(403, message, code="insufficient_permissions"))
        names = request.query_params.get("names", "vllm")
        if names not in ("vllm", "ray"):
            message = f"no such names of metrics: {names!r}; there are 'vllm' and 'ray'"
            raise ApiError(ErrorInfo(400, message, param="names", code="invalid_value"))
        text = await self._metrics(names) if self._metrics else ""
        return await metrics_reply(text, request.headers.get("accept-encoding", ""))

    async def version(self, request: Request) -> dict[str, str]:
        self._holder(request)
        return {"version": __version__}

    async def models(self, request: Request) -> ModelsReply:
        data = [self._entry(name) for name in self._allowed(self._holder(request))]
        return {"object": "list", "data": data}

    async def model(self, request: Request) -> ModelEntry:
        """One of the models; its name may contain slashes, as those of the hub do."""
        name = request.path_params["model"]
        return self._entry(self._asked(name, self._holder(request)))

    def _entry(self, name: str) -> ModelEntry:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "mars-ray"}

    async def status(self, request: Request) -> MarsStatusReply:
        async def state(name: str) -> ModelStatus:
            handle = self._handles[name]
            replicas, decided = await asyncio.gather(handle.status(), handle.decided())
            return model_status(name, replicas, decided)

        models = self._allowed(self._holder(request))
        return {"object": "list", "data": await asyncio.gather(*map(state, models))}

    async def openapi(self, request: Request) -> dict[str, Any]:
        models = self._allowed(self._holder(request))
        return openapi(models, with_keys=self._job.keys_file is not None)

    async def chat(self, request: Request) -> Response:
        body = parse(ChatBody, await self._body(request, "chatcmpl-"))
        return await self._answer(request, body)

    async def complete(self, request: Request) -> Response:
        body = parse(CompletionBody, await self._body(request, "cmpl-"))
        return await self._answer(request, body)

    async def respond(self, request: Request) -> Response:
        body = parse_responses(await self._body(request, "resp_"))
        try:
            return await self._answer(request, to_chat(body), body)
        except ApiError as error:
            raise renamed(error, body) from error

    async def tokenize(self, request: Request) -> Response:
        body = parse(TokenizeBody, await self._body(request, "tok-"))
        handle = self._handles[self._asked(body.model, request.state.key)]
        made = await handle.tokenize(to_tokenize_request(body))
        if isinstance(made, ErrorInfo):
            raise ApiError(made)
        reply: TokenizeReply = {
            "count": len(made.tokens),
            "max_model_len": made.max_context,
            "tokens": list(made.tokens),
        }
        if made.strings is not None:
            reply["token_strs"] = list(made.strings)
        return JSONResponse(reply)

    async def detokenize(self, request: Request) -> Response:
        body = parse(DetokenizeBody, await self._body(request, "detok-"))
        handle = self._handles[self._asked(body.model, request.state.key)]
        text = await handle.detokenize(body.tokens)
        if isinstance(text, ErrorInfo):
            raise ApiError(text)
        return JSONResponse({"prompt": text})

    def _holder(self, request: Request) -> ApiKey | None:
        return self._keys.holder(request.headers.get("authorization"))

    def _allowed(self, key: ApiKey | None) -> list[str]:
        """The names of the models that the key may use."""
        allowed = None if key is None else key.models
        return [name for name in self._jobs if allowed is None or name in allowed]

    def _asked(self, name: str | None, key: ApiKey | None) -> str:
        """The model of a request, which need not name it if there is only one.

        Raises ApiError; a model that the key may not use is reported as unknown.
        """
        models = self._allowed(key)
        if name is None and len(models) == 1:
            return models[0]
        here = ", ".join(map(repr, models))
        if name is None:
            message = f"'model' is missing, and there is more than one: {here}"
            raise ApiError(ErrorInfo(400, message, "model", "missing_required_parameter"))
        if name not in models:
            message = f"there is no model {name!r} here, only {here}"
            raise ApiError(ErrorInfo(404, message, "model", "model_not_found"))
        return name

    async def _body(self, request: Request, prefix: str) -> bytes:
        """The body, of which no byte is read before the key is checked. Raises ApiError."""
        log: RequestLog = request.state.log
        log.id = f"{prefix}{uuid.uuid4().hex}"
        key = request.state.key = self._holder(request)
        log.key = key.name if key else None
        return await read_body(request, self._job.limits)

    async def _answer(
        self,
        http: Request,
        body: ChatBody | CompletionBody,
        response: ResponsesBody | None = None,
    ) -> Response:
        """The reply to a chat, which may be that of a response, or to a completion."""
        log: RequestLog = http.state.log
        key: ApiKey | None = http.state.key
        assert log.id
        model = self._asked(body.model, key)
        handle, job = self._handles[model], self._jobs[model]
        request = to_request(body, log.id, secrets.randbits(63), job, int(time.time()))
        if key:
            request = within(request, key, body)
        if response:
            form = replace(request.reply, route="response", response=begun(response, request))
            request = replace(request, reply=form)
        log.sent(request, with_prompt=self._job.log_prompts)
        log.user = body.safety_identifier if body.user is None else body.user
        log.metadata = body.metadata
        async with AsyncExitStack() as held:
            held.enter_context(self._keys.lease(key, request.choices))
            held.push_async_callback(_settle, log, handle, request.id)
            messages = handle.generate(request)
            await held.enter_async_context(aclosing(messages))
            # The status line depends on the first message.
            first = await anext(messages)
            if isinstance(first, ErrorInfo):
                log.on_message(first)
                raise ApiError(first)
            headers = {}
            if request.max_new_tokens is None:
                headers[_LENGTH_HEADER] = str(request.new_tokens_limit)
            if not request.reply.is_streamed:
                log.on_message(first)
                return Response(first.text, headers=headers, media_type="application/json")
            headers |= _STREAM_HEADERS | {LIMIT_HEADER: str(self._job.limits.slow_reader_s)}
            events = relay(request, log, first, messages)
            return EventStream(events, headers, held.pop_all())


class EventStream(StreamingResponse):
    """A response of events; however it ends, the events and the held resources are closed."""

    def __init__(
        self, events: AsyncGenerator[str, None], headers: dict[str, str], held: AsyncExitStack
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held, aclosing(self._events):
            await super().__call__(scope, receive, send)


async def relay(
    request: GenerationRequest, log: RequestLog, first: Message, rest: AsyncIterator[Message]
) -> AsyncGenerator[str, None]:
    """Yields a stream as its replica writes it. An error is an event of its own and the last one:
    no [DONE] follows."""
    events = 0
    try:
        message = first
        while True:
            log.on_message(message)
            if isinstance(message, ErrorInfo):
                yield error_event(request, message, events)
                return
            if message.ending is not None:
                break
            events += message.text.count("\n\n")
            yield message.text
            message = await anext(rest)
        yield message.text + (DONE if request.reply.route != "response" else "")
    except Exception:
        logger.exception("request %s failed while streaming", request.id)
        yield error_event(request, internal_error(request.id), events)


async def _settle(log: RequestLog, handle: ReplicaClient, request_id: str) -> None:
    """Completes the log of a request whose end was not heard of, as its client has left."""
    if log.is_settled:
        return
    # In a context of its own: Serve cancels what belongs to a request that is cancelled, and may
    # do so now. Whoever is asked limits the time.
    asking = asyncio.create_task(handle.used(request_id), context=Context())
    cancelled: asyncio.CancelledError | None = None
    while not asking.done():
        try:
            await asyncio.wait([asking])
        except asyncio.CancelledError as error:
            cancelled = error
    if used := asking.result():
        log.count(used, is_last=True)
    if cancelled:
        raise cancelled


def within(
    request: GenerationRequest, key: ApiKey, body: ChatBody | CompletionBody
) -> GenerationRequest:
    """The request, limited to the tokens that its key allows, and with the key's priority if the
    body names none.

    Raises ApiError if it asks for more tokens, for more answers than the key may have, or for a
    more urgent priority.
    """
    wrong = None
    param, tokens = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and not tokens:
        param, tokens = "max_completion_tokens", body.max_completion_tokens
    if body.priority is None:
        request = replace(request, priority=max(request.priority, key.priority))
    if key.answers is not None and request.choices > key.answers:
        wrong = request.choices_param, f"{key.answers} answers at a time, not {request.choices}"
    elif request.priority < key.priority:
        wrong = "priority", f"no more urgent priority than {key.priority}"
    elif key.new_tokens is not None and (tokens or 0) > key.new_tokens:
        wrong = param, f"at most {key.new_tokens} tokens per answer"
    if wrong:
        message = f"key {key.name!r} allows {wrong[1]}"
        raise ApiError(ErrorInfo(400, message, param=wrong[0], code="invalid_value"))
    if key.new_tokens is None:
        return request
    return replace(request, new_tokens_limit=min(request.new_tokens_limit, key.new_tokens))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    refusal = error.refusal
    request.state.log.ending = refusal.code
    headers = {}
    if refusal.status == 408:
        # Otherwise OpenAI's clients would retry, and wait as long again.
        headers["x-should-retry"] = "false"
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(refusal), refusal.status, headers)


async def _client_left(_request: Request, _error: Exception) -> Response:
    """The client left before its body was complete; nginx's status for that."""
    return Response(status_code=499)


async def _http_error(request: Request, error: Exception) -> Response:
    """The reply to an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    # Not request.url, which contains the Host header, which may be anything.
    path = request.scope["path"]
    message = f"{request.method} {path}: {error.detail}"
    if error.status_code == 404 and (meant := _meant(path, request.app)):
        message += f"; did you mean {meant}?"
    return JSONResponse(
        error_body(ErrorInfo(error.status_code, message)), error.status_code, error.headers
    )


def _meant(path: str, api: FastAPI) -> str | None:
    """The route that a path may have been meant for: one without its beginning, or much alike."""
    routes = [route.path for route in api.routes if isinstance(route, APIRoute)]
    longer = [route for route in routes if len(path) > 1 and route.endswith(path)]
    return next(iter(longer or get_close_matches(path, routes, 1, _ALIKE)), None)
