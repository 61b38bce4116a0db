"""The OpenAPI description of the service, made from the request models and the reply types.

The routes read their bodies themselves, so FastAPI cannot generate it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from mars_ray import __version__
from mars_ray.serve.openai.request_models import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from mars_ray.serve.openai.response_models import (
    ChatChunk,
    ChatReply,
    DetokenizeReply,
    ErrorReply,
    ModelEntry,
    ModelsReply,
    ResponseEvent,
    ResponseReply,
    StatusReply,
    TextChunk,
    TextReply,
    TokenizeReply,
    VersionReply,
)
from mars_ray.serve.openai.responses import ResponsesBody
from mars_ray.serve.openai.sse import DONE_DATA
from mars_ray.serve.status import MarsStatusReply

_REFS = "#/components/schemas/"
_ERRORS = {
    400: "A field is wrong or not supported; `param` names it.",
    401: "No valid API key.",
    403: "A valid API key, but not one for this.",
    404: "There is no such model.",
    408: "The body did not arrive in time, or the answer took more than it may.",
    413: "The body is too large.",
    429: "Too many requests in flight; retry after `Retry-After`.",
    500: "A fault of the server; its log has the request's id, which the message names.",
    503: "No replica can answer now; try again after `Retry-After`, if there is one.",
}
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}}}
_TOKEN_ERRORS = (400, 401, 404, 408, 413, 500, 503)
_ANSWER_ERRORS = (*_TOKEN_ERRORS, 429)


@dataclass(frozen=True, slots=True)
class _Route:
    path: str
    summary: str
    reply: type | None = None
    body: type | None = None
    chunk: type | None = None
    errors: tuple[int, ...] = ()
    has_mark: bool = True  # a stream ends with `[DONE]`
    is_open: bool = False  # needs no key
    text: str = ""  # the media type of a reply that is not JSON
    method: str = ""  # otherwise POST with a body and GET without
    asks_model: bool = False  # the path names one
    choices: tuple[str, ...] = ()  # for the parameter `names`


_ROUTES = (
    _Route("/", "A page to talk to the model.", text="text/html", is_open=True),
    _Route(
        "/metrics",
        "What the service counts, for Prometheus; with `names=ray` as Ray's nodes export it.",
        text="text/plain",
        errors=(400, 401, 403, 503),
        choices=("vllm", "ray"),
    ),
    _Route("/healthz", "Whether the service lives.", StatusReply, is_open=True),
    _Route("/readyz", "Whether a request would be answered now.", StatusReply, is_open=True),
    _Route("/health", "The same, as vLLM calls it.", StatusReply, is_open=True),
    _Route("/ping", "The same, as SageMaker calls it.", StatusReply, is_open=True),
    _Route("/ping", "The same.", StatusReply, is_open=True, method="post"),
    _Route("/version", "The version of the service.", VersionReply, errors=(401, 503)),
    _Route("/v1/models", "The models served.", ModelsReply, errors=(401, 503)),
    _Route(
        "/v1/models/{model}", "One of them.", ModelEntry, errors=(401, 404, 503), asks_model=True
    ),
    _Route("/v1/mars/status", "What they are doing.", MarsStatusReply, errors=(401, 503)),
    _Route(
        "/v1/chat/completions",
        "The next turn of a conversation.",
        ChatReply,
        ChatBody,
        ChatChunk,
        _ANSWER_ERRORS,
    ),
    _Route(
        "/v1/completions",
        "The continuation of texts.",
        TextReply,
        CompletionBody,
        TextChunk,
        _ANSWER_ERRORS,
    ),
    _Route(
        "/v1/responses",
        "The next turn of a conversation in items; nothing is stored.",
        ResponseReply,
        ResponsesBody,
        ResponseEvent,
        _ANSWER_ERRORS,
        has_mark=False,
    ),
    _Route("/tokenize", "A prompt's tokens.", TokenizeReply, TokenizeBody, errors=_TOKEN_ERRORS),
    _Route(
        "/detokenize", "The text of tokens.", DetokenizeReply, DetokenizeBody, errors=_TOKEN_ERRORS
    ),
)


def openapi(names: Sequence[str], with_keys: bool) -> dict[str, Any]:
    """The description, in OpenAPI 3.1.

    names: the models that are served. with_keys: whether the service requires API keys.
    """
    used = {model for route in _ROUTES for model in (route.reply, route.body, route.chunk) if model}
    models = sorted(used | {ErrorReply}, key=lambda model: model.__name__)
    _, schemas = TypeAdapter.json_schemas(
        [(model, "validation", TypeAdapter(model)) for model in models],
        ref_template=_REFS + "{model}",
    )
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    for body in (route.body for route in _ROUTES if route.body):
        schema = schemas["$defs"][body.__name__]
        can_lack = "model" not in schema.get("required", ())
        schema["properties"]["model"] = {"title": "Model", "enum": [*names, *[None] * can_lack]}
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, Any] = {}
    for route in _ROUTES:
        paths.setdefault(route.path, {}).update(_operation(route, with_keys))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mars-ray",
            "version": __version__,
            "description": "OpenAI's API, with the choice between quality and speed.",
        },
        "paths": paths,
        "components": components,
    }


def _operation(route: _Route, with_keys: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": route.summary, "responses": _responses(route)}
    if not with_keys:
        for status in ("401", "403"):
            described["responses"].pop(status, None)
    elif not route.is_open:
        described["security"] = [{"key": []}]
    if route.asks_model:
        place = {"name": "model", "in": "path", "required": True}
        described["parameters"] = [place | {"schema": {"type": "string"}}]
    if route.choices:
        schema = {"type": "string", "enum": list(route.choices), "default": route.choices[0]}
        described["parameters"] = [{"name": "names", "in": "query", "schema": schema}]
    if route.body is None:
        return {route.method or "get": described}
    described["requestBody"] = {"required": True, "content": _json(route.body)}
    return {route.method or "post": described}


def _responses(route: _Route) -> dict[str, Any]:
    text = {route.text: {"schema": {"type": "string"}}}
    content = text if route.reply is None else _json(route.reply)
    if route.chunk is not None:
        content = content | {"text/event-stream": {"schema": _event(route)}}
    responses: dict[str, Any] = {"200": {"description": route.summary, "content": content}}
    for status in sorted(route.errors):
        described = {"description": _ERRORS[status], "content": _json(ErrorReply)}
        responses[str(status)] = described | ({"headers": _RETRY} if status in (429, 503) else {})
    if route.path in ("/readyz", "/health", "/ping"):
        responses["503"] = {"description": "Not yet, or no more.", "content": _json(StatusReply)}
    return responses


def _event(route: _Route) -> dict[str, Any]:
    """One event of a stream; OpenAPI before 3.2 has no schema for the whole stream."""
    written = {
        "contentMediaType": "application/json",
        "contentSchema": {
            "anyOf": [
                {"$ref": _REFS + model.__name__} for model in (route.chunk, ErrorReply) if model
            ]
        },
    }
    data: dict[str, Any] = {"type": "string", "anyOf": [written]}
    if route.has_mark:
        data["description"] = "`[DONE]` comes last; if an error comes, it is the last."
        data["anyOf"] = [{"const": DONE_DATA}, written]
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _json(model: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFS + model.__name__}}}
