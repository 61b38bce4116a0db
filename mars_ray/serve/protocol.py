"""The HTTP API's bodies: requests checked field by field, replies in OpenAI's shapes.

Nothing that is accepted is ignored: a field this server does not act on is refused by name.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
)
from pydantic_core import ErrorDetails

from mars_ray.config.decode import (
    BlockCachedMode,
    ConfidenceMode,
    ExactMode,
    Mode,
    Sampling,
    VerifiedMode,
)
from mars_ray.config.serve import ServeJob
from mars_ray.serve.messages import ChatCall, Finish, Refusal, Turn

# OpenAI's own limit; a stop string is searched for in every step's text.
_MAX_STOPS = 4
_MAX_STOP_CHARS = 256
# The chat template is rendered once for each assistant turn.
_MAX_MESSAGES = 512
_MODES: dict[str, Mode] = {
    "exact": ExactMode(),
    "verified": VerifiedMode(),
    "confidence": ConfidenceMode(),
}
# Names of the variants of a message's content; they mark pydantic's error locations.
_TEXT, _PARTS = "<text>", "<parts>"


class ApiError(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Wire(BaseModel):
    """Part of a request's body: no unknown fields, and no text where a number belongs."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Wire):
    """A part of a message; text is the only kind."""

    type: Literal["text"]
    text: str


def _content_kind(value: Any) -> str:
    return _PARTS if isinstance(value, list | tuple) else _TEXT


Content = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[tuple[TextPart, ...], Tag(_PARTS)],
    Discriminator(_content_kind),
]


class ChatMessage(Wire):
    """One turn of the conversation."""

    role: Literal["system", "user", "assistant"]
    content: Content

    def turn(self) -> Turn:
        """The message with its parts joined."""
        if isinstance(self.content, str):
            return Turn(self.role, self.content)
        return Turn(self.role, "".join(part.text for part in self.content))


class StreamOptions(Wire):
    """What a stream contains besides text."""

    include_usage: bool = False


StopString = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]


class ChatBody(Wire):
    """Body of a chat completion request; null stands for a field not given."""

    model: str
    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1, max_length=_MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    # OpenAI's default: a client that does not say wants sampling at 1.
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[StopString, ...], Field(max_length=_MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    mode: Literal["exact", "verified", "confidence"] | None = None
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    window: Annotated[int, Field(ge=1, le=64)] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        # A tuple: strict validation takes JSON's list for one only where no validator ran before.
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage


def parse_chat(body: bytes) -> ChatBody:
    """The checked body. Raises ApiError that names the first field at fault."""
    try:
        return ChatBody.model_validate_json(body)
    except ValidationError as error:
        raise ApiError(_refusal(error.errors(include_url=False)[0])) from error


def _refusal(error: ErrorDetails) -> Refusal:
    if error["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {error['msg']}", code="invalid_json")
    if not error["loc"]:
        return Refusal(400, "the body must be a JSON object", code="invalid_json")
    param = ".".join(str(place) for place in error["loc"] if place not in (_TEXT, _PARTS))
    if error["type"] == "extra_forbidden":
        message = f"'{param}' is not supported by this server"
        return Refusal(400, message, param=param, code="unsupported_parameter")
    if error["type"] == "missing":
        return Refusal(400, f"'{param}' is missing", param=param, code="missing_required_parameter")
    return Refusal(400, f"'{param}': {error['msg']}", param=param, code="invalid_value")


def to_call(body: ChatBody, request_id: str, seed: int, job: ServeJob) -> ChatCall:
    """What the replica is asked for; `seed` is used if the request has none.

    Raises ApiError for settings that contradict each other or exceed a limit.
    """
    if body.stream_options is not None and not body.stream:
        message = "'stream_options' has no effect without 'stream'"
        raise ApiError(Refusal(400, message, param="stream_options"))
    sampling = Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k is None else body.top_k,
        seed=seed if body.seed is None else body.seed,
    )
    return ChatCall(
        id=request_id,
        messages=tuple(message.turn() for message in body.messages),
        mode=_mode(body, job.default_mode),
        sampling=sampling,
        max_new_tokens=_max_new_tokens(body, job.limits.new_tokens),
        stop=body.stop or (),
    )


def _max_new_tokens(body: ChatBody, limit: int) -> int | None:
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(asked) > 1:
        raise ApiError(
            Refusal(400, "'max_tokens' and 'max_completion_tokens' differ; give one", param=param)
        )
    for tokens in asked:
        if tokens is not None and tokens > limit:
            message = f"'{param}' is {tokens}, but this server writes at most {limit} tokens"
            raise ApiError(Refusal(400, message, param=param, code="invalid_value"))
        return tokens
    return None


def _mode(body: ChatBody, default: Mode) -> Mode:
    """The request's mode; what it leaves open is the server's default, or else the mode's."""
    base = default
    if body.mode is not None and body.mode != default.type:
        base = _MODES[body.mode]
    given = {
        name: value
        for name, value in (("threshold", body.threshold), ("window", body.window))
        if value is not None
    }
    for name in given:
        if name not in type(base).model_fields:
            message = f"'{name}' has no effect in mode '{base.type}'"
            raise ApiError(Refusal(400, message, param=name, code="invalid_value"))
    return base.model_copy(update=given)


def threshold_of(mode: Mode) -> float | None:
    """The threshold in force; `exact` has none."""
    match mode:
        case ExactMode():
            return None
        case VerifiedMode() | ConfidenceMode() | BlockCachedMode():
            return mode.threshold


def usage(call: ChatCall, finish: Finish) -> dict[str, Any]:
    """OpenAI's usage, and under `mars` what multi-token decoding did."""
    return {
        "prompt_tokens": finish.prompt_tokens,
        "completion_tokens": finish.completion_tokens,
        "total_tokens": finish.prompt_tokens + finish.completion_tokens,
        "mars": {
            "forwards": finish.forwards,
            "tokens_per_forward": finish.tokens_per_forward,
            "mode": call.mode.type,
            "threshold": threshold_of(call.mode),
        },
    }


def completion(
    call: ChatCall, model: str, created: int, text: str, finish: Finish
) -> dict[str, Any]:
    """Body of an answer that is not streamed."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None,
        "finish_reason": finish.reason,
    }
    return {
        "id": call.id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage(call, finish),
    }


def model_list(model: str, created: int) -> dict[str, Any]:
    """Body of the list of models."""
    entry = {"id": model, "object": "model", "created": created, "owned_by": "mars-ray"}
    return {"object": "list", "data": [entry]}


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Body of an error."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    if refusal.status == 429:
        kind = "rate_limit_error"
    return {
        "error": {
            "message": refusal.message,
            "type": kind,
            "param": refusal.param,
            "code": refusal.code,
        }
    }
