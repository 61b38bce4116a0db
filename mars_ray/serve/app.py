"""The HTTP API: routes, limits and errors, over any source of answers."""

import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mars_ray.config.serve import ServeJob
from mars_ray.serve.messages import ChatCall, Message, Piece, Refusal
from mars_ray.serve.protocol import (
    ApiError,
    ChatBody,
    completion,
    error_body,
    model_list,
    parse_chat,
    to_call,
)
from mars_ray.serve.stream import Chunks, events, internal_error

logger = logging.getLogger(__name__)

# Answers a checked request. The last message has a finish or is a refusal; closing the generator
# ends the work behind it.
Generate = Callable[[ChatCall], AsyncGenerator[Message, None]]

# Streams must reach the client piece by piece through caches and nginx.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def build_api(job: ServeJob, model: str, generate: Generate) -> FastAPI:
    """The API of one model; `model` is its name in requests."""
    routes = _Routes(job, model, generate)
    # The generated pages would load their scripts from another site.
    api = FastAPI(title="mars-ray", docs_url=None, redoc_url=None, openapi_url=None)
    api.add_api_route("/healthz", routes.healthz, methods=["GET"])
    api.add_api_route("/v1/models", routes.models, methods=["GET"])
    api.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"], response_model=None)
    api.add_exception_handler(ApiError, _api_error)
    api.add_exception_handler(HTTPException, _http_error)
    return api


class _Routes:
    def __init__(self, job: ServeJob, model: str, generate: Generate) -> None:
        self._job = job
        self._model = model
        self._generate = generate
        self._started = int(time.time())

    async def healthz(self) -> dict[str, str]:
        return {"status": "ok"}

    async def models(self) -> dict[str, Any]:
        return model_list(self._model, self._started)

    async def chat(self, request: Request) -> Response:
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        try:
            body = parse_chat(await _read(request, self._job.limits.body_bytes))
            return await self._answer(body, request_id)
        except ApiError:
            raise
        except ClientDisconnect:
            # Nobody reads the answer to half a request; this is nginx's number for it.
            return Response(status_code=499)
        except Exception as error:
            logger.exception("request %s failed", request_id)
            raise ApiError(internal_error(request_id)) from error

    async def _answer(self, body: ChatBody, request_id: str) -> Response:
        if body.model != self._model:
            message = f"there is no model {body.model!r} here, only {self._model!r}"
            raise ApiError(Refusal(404, message, param="model", code="model_not_found"))
        call = to_call(body, request_id, secrets.randbits(63), self._job)
        created = int(time.time())
        messages = self._generate(call)
        # The status line depends on the first message.
        first = await anext(messages)
        if isinstance(first, Refusal):
            raise ApiError(first)
        if body.stream:
            chunks = Chunks(call, self._model, created, body.wants_usage)
            return StreamingResponse(
                events(chunks, first, messages),
                media_type="text/event-stream",
                headers=_STREAM_HEADERS,
            )
        text, last = await _collect(first, messages)
        assert last.finish is not None
        return JSONResponse(completion(call, self._model, created, text, last.finish))


async def _collect(first: Piece, rest: AsyncGenerator[Message, None]) -> tuple[str, Piece]:
    """The whole text and the last piece. Raises ApiError if the answer fails on its way."""
    parts, last = [first.text], first
    async with aclosing(rest):
        while last.finish is None:
            message = await anext(rest)
            if isinstance(message, Refusal):
                raise ApiError(message)
            parts.append(message.text)
            last = message
    return "".join(parts), last


async def _read(request: Request, limit_bytes: int) -> bytes:
    """The body, read no further than the limit."""
    refusal = Refusal(
        413,
        f"the body has more than {limit_bytes} bytes, this server's limit",
        code="body_too_large",
    )
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit_bytes:
            raise ApiError(refusal)
    return bytes(body)


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    refusal = error.refusal
    after = refusal.retry_after_s
    headers = None if after is None else {"Retry-After": str(after)}
    return JSONResponse(error_body(refusal), refusal.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(
        error_body(Refusal(error.status_code, message)), error.status_code, error.headers
    )
