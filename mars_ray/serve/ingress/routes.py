"""The HTTP API: routes, limits and errors, over any backend."""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from mars_ray import __version__
from mars_ray.config.serve import ServeJob
from mars_ray.serve.ingress import page_files
from mars_ray.serve.ingress.api_keys import ApiKey, ApiKeys
from mars_ray.serve.ingress.body import read_body
from mars_ray.serve.ingress.exposition import Names
from mars_ray.serve.ingress.memory_routes import MemoryRoutes
from mars_ray.serve.ingress.metrics_endpoint import page
from mars_ray.serve.ingress.middleware import Entry, Gate, entry_of, logged
from mars_ray.serve.ingress.models import Backend, Model, Models
from mars_ray.serve.ingress.proxy import LIMIT_HEADER
from mars_ray.serve.openai.openapi import openapi
from mars_ray.serve.openai.replies import (
    Answer,
    ChatShape,
    Shape,
    TextShape,
    error_body,
    model_entry,
    model_list,
    reply,
)
from mars_ray.serve.openai.request_models import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
)
from mars_ray.serve.openai.response_models import ModelEntry, ModelsReply, TokenizeReply
from mars_ray.serve.openai.responses_reply import ResponseEvents, whole
from mars_ray.serve.openai.responses_request import (
    ResponsesBody,
    parse_responses,
    renamed,
    to_chat,
)
from mars_ray.serve.openai.sse import Chunks, Events, EventStream, internal_error, stream
from mars_ray.serve.openai.validation import to_generation_request, to_tokenize_request
from mars_ray.serve.protocol import ErrorInfo, GenerationRequest, Message, Used
from mars_ray.serve.status import MarsStatusReply, ModelStatus, model_status

logger = logging.getLogger(__name__)

# Where an answer is cut whose length the client leaves open, or sets beyond the limit.
_LENGTH_HEADER = "X-New-Tokens-Limit"
# Lets streams reach the client piece by piece through caches and nginx.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def build_api(
    job: ServeJob,
    backends: Mapping[str, Backend],
    gate: Gate | None = None,
    metrics: Callable[[Names], Awaitable[str]] | None = None,
    observe: Callable[[Entry], None] | None = None,
) -> FastAPI:
    """The API of the job's models behind a gate; `backends` are by the models' names.

    `metrics` returns the text of `/metrics` under given names; `observe` is told of each finished
    request.
    """
    gate = gate or Gate()
    routes = _Routes(job, Models(job, backends), gate, metrics)
    # The generated pages would load their scripts from another site.
    api = FastAPI(title="mars-ray", docs_url=None, redoc_url=None, openapi_url=None)
    for path, route in (
        ("/", page_files.page),
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
    memory = routes.memory
    for method, route in (("GET", memory.get), ("DELETE", memory.delete), ("PUT", memory.put)):
        api.add_api_route("/v1/mars/autoscaling", route, methods=[method], response_model=None)
    api.mount(page_files.FILES, page_files.PageFiles())
    api.add_exception_handler(ApiError, _api_error)
    api.add_exception_handler(HTTPException, _http_error)
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
    api.add_middleware(gate.around)
    api.add_middleware(logged, observe=observe)
    return api


class _Routes:
    def __init__(
        self,
        job: ServeJob,
        models: Models,
        gate: Gate,
        metrics: Callable[[Names], Awaitable[str]] | None,
    ) -> None:
        self._job = job
        self._metrics = metrics
        self._models = models
        self._gate = gate
        self._keys = ApiKeys(job.keys_file)
        self.memory = MemoryRoutes(job.limits, models, self._keys)
        self._started = int(time.time())

    async def healthz(self) -> dict[str, str]:
        return {"status": "ok"}

    async def readyz(self) -> Response:
        """Whether a request would be answered now: 200 or 503."""
        if not self._gate.is_open:
            return JSONResponse({"status": "draining"}, 503)
        models = self._models.of(key=None)
        ready = all(await asyncio.gather(*(model.backend.is_ready() for model in models)))
        status = "ready" if ready else "not ready"
        return JSONResponse({"status": status}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        key = self._holder(request)
        if len(self._models.of(key)) < len(self._models.of(None)):
            message = "this key is not good for all models, and the metrics are those of all"
            raise ApiError(ErrorInfo(403, message, code="insufficient_permissions"))
        names = request.query_params.get("names", "vllm")
        if names not in ("vllm", "ray"):
            message = f"no such names of metrics: {names!r}; there are 'vllm' and 'ray'"
            raise ApiError(ErrorInfo(400, message, param="names", code="invalid_value"))
        text = await self._metrics(names) if self._metrics else ""
        return await page(text, request.headers.get("accept-encoding", ""))

    async def version(self, request: Request) -> dict[str, str]:
        self._holder(request)
        return {"version": __version__}

    async def models(self, request: Request) -> ModelsReply:
        models = self._models.of(self._holder(request))
        return model_list([model.name for model in models], self._started)

    async def model(self, request: Request) -> ModelEntry:
        """One of the models; its name may contain slashes, as those of the hub do."""
        name = request.path_params["model"]
        return model_entry(self._models.asked(name, self._holder(request)).name, self._started)

    async def status(self, request: Request) -> MarsStatusReply:
        """The current status of the models."""
        models = self._models.of(self._holder(request))
        return {"object": "list", "data": await asyncio.gather(*map(_status_of, models))}

    async def openapi(self, request: Request) -> dict[str, Any]:
        models = self._models.of(self._holder(request))
        names = [model.name for model in models]
        return openapi(names, with_keys=self._job.keys_file is not None)

    async def chat(self, request: Request) -> Response:
        async def answer(raw: bytes, entry: Entry, key: ApiKey | None) -> Response:
            body = parse(ChatBody, raw)
            return await self._answer(body, entry, key, _Choices(body, ChatShape()))

        return await self._guarded(request, f"chatcmpl-{uuid.uuid4().hex}", answer)

    async def complete(self, request: Request) -> Response:
        async def answer(raw: bytes, entry: Entry, key: ApiKey | None) -> Response:
            body = parse(CompletionBody, raw)
            return await self._answer(body, entry, key, _Choices(body, TextShape()))

        return await self._guarded(request, f"cmpl-{uuid.uuid4().hex}", answer)

    async def respond(self, request: Request) -> Response:
        async def answer(raw: bytes, entry: Entry, key: ApiKey | None) -> Response:
            body = parse_responses(raw)
            try:
                return await self._answer(to_chat(body), entry, key, _Response(body))
            except ApiError as error:
                raise renamed(error, body) from error

        return await self._guarded(request, f"resp_{uuid.uuid4().hex}", answer)

    async def tokenize(self, request: Request) -> Response:
        return await self._guarded(request, f"tok-{uuid.uuid4().hex}", self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._guarded(request, f"detok-{uuid.uuid4().hex}", self._detokenize)

    async def _guarded(
        self,
        request: Request,
        request_id: str,
        answer: Callable[[bytes, Entry, ApiKey | None], Awaitable[Response]],
    ) -> Response:
        """The answer to a body; unexpected errors are logged under the request's id."""
        entry = entry_of(request)
        entry.id = request_id
        # Checked before a byte of the body is read.
        key = self._holder(request)
        entry.key = key.name if key else None
        try:
            body = await read_body(request, self._job.limits)
            return await answer(body, entry, key)
        except ApiError:
            raise
        except ClientDisconnect:
            # The client left before its body was complete; nginx's status for that.
            return Response(status_code=499)
        except Exception as error:
            logger.exception("request %s failed", request_id)
            raise ApiError(internal_error(request_id)) from error

    def _holder(self, request: Request) -> ApiKey | None:
        return self._keys.holder(request.headers.get("authorization"))

    async def _answer(
        self,
        body: ChatBody | CompletionBody,
        entry: Entry,
        key: ApiKey | None,
        form: "_Choices | _Response",
    ) -> Response:
        assert entry.id
        model = self._models.asked(body.model, key)
        call = to_generation_request(body, entry.id, secrets.randbits(63), model.job)
        call = _within(call, key, "max_tokens" if body.max_tokens else "max_completion_tokens")
        entry.called(call, model.name, with_prompt=self._job.log_prompts)
        entry.user, entry.metadata = body.end_user, body.metadata
        created = int(time.time())
        async with AsyncExitStack() as held:
            held.enter_context(self._keys.lease(key, call.choices))
            held.push_async_callback(_settle, entry, model.backend, call.id)
            messages = model.backend.generate(call)
            await held.enter_async_context(aclosing(messages))
            # The status line depends on the first message.
            first = await anext(messages)
            if isinstance(first, ErrorInfo):
                entry.told(first)
                raise ApiError(first)
            open_end = {} if call.max_new_tokens else {_LENGTH_HEADER: str(call.new_tokens_limit)}
            if body.stream:
                headers = _STREAM_HEADERS | {LIMIT_HEADER: str(self._job.limits.slow_reader_s)}
                events = form.events(call, model.name, created)
                text = stream(events, first, messages, entry.told)
                return EventStream(text, headers | open_end, held.pop_all())
            answers = [
                Answer(
                    logprobs=None if call.logprobs is None else [],
                    forwards=[] if body.return_forwards else None,
                )
                for _ in range(call.choices)
            ]
            await _collect(answers, first, messages, entry)
            return JSONResponse(form.reply(call, model.name, created, answers), headers=open_end)

    async def _tokenize(self, raw: bytes, _entry: Entry, key: ApiKey | None) -> Response:
        body = parse(TokenizeBody, raw)
        backend = self._models.asked(body.model, key).backend
        made = await backend.tokenize(to_tokenize_request(body))
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

    async def _detokenize(self, raw: bytes, _entry: Entry, key: ApiKey | None) -> Response:
        body = parse(DetokenizeBody, raw)
        text = await self._models.asked(body.model, key).backend.detokenize(body.tokens)
        if isinstance(text, ErrorInfo):
            raise ApiError(text)
        return JSONResponse({"prompt": text})


@dataclass(frozen=True, slots=True)
class _Choices:
    """How a chat or a completion is answered: by choices, whole or in chunks."""

    body: ChatBody | CompletionBody
    shape: Shape

    def events(self, call: GenerationRequest, model: str, created: int) -> Events:
        return Chunks(
            call,
            self.shape,
            model,
            created,
            self.body.wants_usage,
            bool(self.body.return_forwards),
            self.body.wants_usage_so_far,
        )

    def reply(
        self, call: GenerationRequest, model: str, created: int, answers: Sequence[Answer]
    ) -> Any:
        return reply(call, self.shape, model, created, answers)


@dataclass(frozen=True, slots=True)
class _Response:
    """How a response request is answered: by items, whole or in events."""

    body: ResponsesBody

    def events(self, call: GenerationRequest, model: str, created: int) -> Events:
        return ResponseEvents(call, self.body, model, created)

    def reply(
        self, call: GenerationRequest, model: str, created: int, answers: Sequence[Answer]
    ) -> Any:
        return whole(self.body, call, model, created, answers[0])


async def _settle(entry: Entry, backend: Backend, call_id: str) -> None:
    """Completes the entry of a call whose end was not heard of, as its client has left."""
    if entry.is_settled:
        return
    # In a context of its own: Serve cancels what belongs to a request that is cancelled, and may
    # do so now. Whoever is asked limits the time.
    asking = asyncio.create_task(_told(backend, call_id), context=Context())
    cancelled: asyncio.CancelledError | None = None
    while not asking.done():
        try:
            await asyncio.wait([asking])
        except asyncio.CancelledError as error:
            cancelled = error
    if used := asking.result():
        entry.settle(used)
    if cancelled:
        raise cancelled


async def _told(backend: Backend, call_id: str) -> Used | None:
    return await backend.used(call_id)


async def _status_of(model: Model) -> ModelStatus:
    replicas, decided = await asyncio.gather(model.backend.status(), model.backend.decided())
    return model_status(model.name, replicas, decided)


def _within(call: GenerationRequest, key: ApiKey | None, param: str) -> GenerationRequest:
    """The call, limited to the tokens that its key allows.

    Raises ApiError if it asks for more, naming `param`, for more answers than the key may have, or
    for a more urgent priority.
    """
    if key and key.answers is not None and call.choices > key.answers:
        message = f"key {key.name!r} allows {key.answers} answers at a time, not {call.choices}"
        raise ApiError(ErrorInfo(400, message, param=call.choices_param, code="invalid_value"))
    if key and call.priority < key.priority:
        message = f"key {key.name!r} allows no more urgent priority than {key.priority}"
        raise ApiError(ErrorInfo(400, message, param="priority", code="invalid_value"))
    if key is None or key.new_tokens is None:
        return call
    if call.max_new_tokens is not None and call.max_new_tokens > key.new_tokens:
        message = f"key {key.name!r} allows at most {key.new_tokens} tokens per answer"
        raise ApiError(ErrorInfo(400, message, param=param, code="invalid_value"))
    return replace(call, new_tokens_limit=min(call.new_tokens_limit, key.new_tokens))


async def _collect(
    answers: list[Answer], first: Message, rest: AsyncIterator[Message], entry: Entry
) -> None:
    """Reads every answer to its end. Raises ApiError if one fails."""
    message = first
    while True:
        entry.told(message)
        if isinstance(message, ErrorInfo):
            raise ApiError(message)
        answers[message.choice].add(message)
        if all(answer.finish for answer in answers):
            return
        message = await anext(rest)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    refusal = error.refusal
    entry_of(request).ending = refusal.code
    headers = {}
    if refusal.status == 408:
        # Otherwise OpenAI's clients would retry, and wait as long again.
        headers["x-should-retry"] = "false"
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(refusal), refusal.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """The reply to an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    # Not request.url, which contains the Host header, which may be anything.
    message = f"{request.method} {request.scope['path']}: {error.detail}"
    return JSONResponse(
        error_body(ErrorInfo(error.status_code, message)), error.status_code, error.headers
    )
