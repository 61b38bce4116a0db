"""Request bodies, checked field by field.

Nothing that is accepted is ignored: a field this server does not act on is refused by name, unless
its value changes nothing (the `NoOps` below). Null is a field not given, whatever its name.
"""

import json
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails

from mars_ray.config.base import plain_words
from mars_ray.config.modes import Threshold
from mars_ray.serve.protocol import ErrorInfo, Switches, ToolCall, Turn


class Wire(BaseModel):
    """Part of a request's body: no unknown fields, and no text where a number belongs."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _is_off(value: bool) -> bool:
    if value:
        raise ValueError("should be false")
    return value


def _is_on(value: bool) -> bool:
    if not value:
        raise ValueError("should be true")
    return value


# A literal would take 0 for false, and the schema says that it is none.
Off = Annotated[bool, AfterValidator(_is_off), Field(json_schema_extra={"const": False})]
On = Annotated[bool, AfterValidator(_is_on), Field(json_schema_extra={"const": True})]
Zero = Annotated[int, Field(ge=0, le=0)]
Nothing = tuple[()]


# Fields of other servers that clients send out of habit, with the values that change nothing here.
# Any other value asks for something that this server does not do, and is refused by name. Fields of
# which only null is harmless need no entry.
class AnswerNoOps(Wire):
    """No-ops of chats and completions."""

    service_tier: Literal["auto", "default"] | None = None
    store: Off | None = None
    # A hint: beginnings of prompts are shared whatever it says.
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    use_beam_search: Off | None = None
    early_stopping: Off | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    skip_special_tokens: On | None = None
    # It is about special tokens in the text, and there are none.
    spaces_between_special_tokens: bool | None = None
    detokenize: On | None = None
    bad_words: Nothing | None = None
    watermarking: Off | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=-1)] | None = None
    return_token_ids: Off | None = None
    return_tokens_as_token_ids: Off | None = None
    return_token_offsets: Off | None = None
    return_prompt_text: Off | None = None
    # About images and experts, of which there are none either.
    routed_experts_prompt_start: Zero | None = None
    mm_payload: Literal["tensors", "none"] | None = None


class ChatNoOps(Wire):
    """No-ops of chats only."""

    function_call: Literal["none"] | None = None
    modalities: tuple[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    echo: Off | None = None
    add_generation_prompt: On | None = None
    continue_final_message: Off | None = None
    add_special_tokens: Off | None = None


class CompletionNoOps(Wire):
    """No-ops of completions only."""

    suffix: Literal[""] | None = None


# How like a field must be to be meant: some of other servers' are a little like ours.
_ALIKE = 0.8
# What vLLM has for answers of a form.
_GUIDED = ("structured_outputs", "guided_json")


def no_ops_of(kind: type[Wire]) -> set[str]:
    """Names of the fields that do nothing in a body of this kind."""
    bases = (base for base in (AnswerNoOps, ChatNoOps, CompletionNoOps) if issubclass(kind, base))
    return {name for base in bases for name in base.model_fields}


# OpenAI's own limit; every step's text is searched for each stop string.
_MAX_STOPS = 4
# The chat template is rendered once for each assistant turn.
MAX_MESSAGES = 512
_MAX_PROMPTS = 128
MAX_TOOLS = 128
# Names of the variants of a field; they mark pydantic's error locations.
TEXT, _TEXTS, _TOKENS, _TOKEN_LISTS = "<text>", "<texts>", "<ids>", "<id lists>"
_TOOL, ITEMS = "<tool>", "<items>"
_VARIANTS = (TEXT, _TEXTS, _TOKENS, _TOKEN_LISTS, _TOOL, ITEMS)
_ITEM_KINDS = ("message", "function_call", "function_call_output", "reasoning")
_NAMED = ("system", "developer", "user", "assistant", "tool", "input_text", "output_text")
# Stops at a list's first fault: a body can hold hundreds of thousands, which take seconds to list.
_FIRST = Field(fail_fast=True)


class ApiError(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, refusal: ErrorInfo) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refuse(param: str, message: str) -> NoReturn:
    """Raises ApiError for the value of this field."""
    raise ApiError(ErrorInfo(400, message, param=param, code="invalid_value"))


class TextPart(Wire):
    """A part of a message; text is the only kind."""

    type: Literal["text"]
    text: str


def text_or_items(value: Any) -> str:
    """The variant of a field that is a text or a list."""
    return ITEMS if isinstance(value, list | tuple) else TEXT


Content = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[tuple[TextPart, ...], _FIRST, Tag(ITEMS)],
    Discriminator(text_or_items),
]


def _joined(content: str | tuple[TextPart, ...]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


# Frameworks name who speaks in every message. It is for templates that show it.
Speaker = Annotated[str, Field(max_length=256)]


class PlainMessage(Wire):
    """A message of the client or its user."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: Speaker | None = None

    def turn(self) -> Turn:
        """The message with its parts joined; `developer` is OpenAI's newer name of `system`."""
        role = "system" if self.role == "developer" else self.role
        return Turn(role, _joined(self.content), name=self.name)


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def _some_json(value: Any) -> Any:
    """Functions without parameters are called with an empty text, or null, by some clients."""
    return "{}" if value is None or (isinstance(value, str) and not value.strip()) else value


Arguments = Annotated[
    str, BeforeValidator(_some_json), WithJsonSchema({"type": ["string", "null"]})
]


class CalledFunction(Wire):
    """The function that was called, and with what."""

    name: ToolName
    arguments: Arguments
    parsed_arguments: Any = None  # by the official client


class MessageToolCall(Wire):
    """A call that an earlier answer has made, and the id by which its result is found."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a client that has joined a stream's deltas


class AssistantMessage(Wire):
    """An earlier answer, also as the official client hands it back."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[tuple[MessageToolCall, ...], _FIRST] | None = None
    # The official client sends these fields; answers of this server never have a value in them.
    refusal: None = None
    annotations: Nothing | None = None
    audio: None = None
    function_call: None = None
    name: Speaker | None = None
    parsed: Any = None  # its own reading of the content
    # Thoughts, by vLLM's name and by DeepSeek's.
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _thinks_once(self) -> "AssistantMessage":
        if len({self.reasoning, self.reasoning_content} - {None}) > 1:
            raise ValueError("'reasoning' and 'reasoning_content' differ")
        return self

    def turn(self) -> Turn:
        calls = tuple(
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in self.tool_calls or ()
        )
        thoughts = self.reasoning if self.reasoning_content is None else self.reasoning_content
        content = _joined(self.content or "")
        return Turn("assistant", content, calls, reasoning=thoughts, name=self.name)


class ToolMessage(Wire):
    """The result of a call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: Speaker | None = None

    def turn(self) -> Turn:
        content = _joined(self.content)
        return Turn("tool", content, call_id=self.tool_call_id, name=self.name)


ChatMessage = Annotated[PlainMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[tuple[ChatMessage, ...], _FIRST, Field(min_length=1, max_length=MAX_MESSAGES)]


class FunctionBody(Wire):
    """A function that answers may call; its parameters are a JSON schema, which calls follow."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Wire):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Wire):
    """The name of a function that must be called."""

    name: ToolName


class NamedTool(Wire):
    """A tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)] | Annotated[NamedTool, Tag(_TOOL)],
    Discriminator(lambda value: TEXT if isinstance(value, str) else _TOOL),
]


class AnyFormat(Wire):
    """Asks for any text, or for any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(Wire):
    """A JSON schema with a name. Answers always follow it."""

    name: ToolName
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Wire):
    """Asks for JSON of one schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[AnyFormat | SchemaFormat, Field(discriminator="type")]
Token = Annotated[int, Field(ge=0)]
Tokens = Annotated[tuple[Token, ...], _FIRST, Field(min_length=1)]
_SEVERAL = Field(min_length=1, max_length=_MAX_PROMPTS)


def _prompt_kind(value: Any) -> str:
    if not isinstance(value, list | tuple):
        return TEXT
    first = value[0] if value else ""
    if isinstance(first, list | tuple):
        return _TOKEN_LISTS
    return _TEXTS if isinstance(first, str) else _TOKENS


Prompts = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[tuple[str, ...], _FIRST, _SEVERAL, Tag(_TEXTS)]
    | Annotated[Tokens, Tag(_TOKENS)]
    | Annotated[tuple[Tokens, ...], _FIRST, _SEVERAL, Tag(_TOKEN_LISTS)],
    Discriminator(_prompt_kind),
]


class StreamOptions(Wire):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Off | None = None
    continuous_usage_stats: bool | None = None


class ThinkingSwitches(Wire):
    """The variables of a chat template that a request may set, as Qwen's and DeepSeek's call them.
    Others would let a request rewrite the prompt."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[
    Annotated[StopString, Tag(TEXT)]
    | Annotated[tuple[StopString, ...], _FIRST, Field(max_length=_MAX_STOPS), Tag(ITEMS)],
    Discriminator(text_or_items),
]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenCount = Annotated[int, Field(ge=1, lt=2**63)]
# Only one spelling of each number: with another one, the same token could be given twice.
TokenKey = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")]
Biases = Annotated[
    dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024, json_schema_extra={"additionalProperties": False}),
]


# OpenAI's limits.
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]


class Body(Wire):
    """A whole body; null stands for a field not given, also for one that is not known."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"type": "null"}})


class AnyAnswerBody(Body):
    """The fields of all requests for answers."""

    model: str
    # OpenAI's default: a client that names no temperature wants sampling at 1.
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # -1 and 0: no limit
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    # OpenAI's name for the end user behind the request; it is written to the log.
    user: Annotated[str, Field(max_length=256)] | None = None
    safety_identifier: Annotated[str, Field(max_length=256)] | None = None  # its newer name
    metadata: Metadata | None = None  # written to the log, too
    # The fields from here on are not in OpenAI's API.
    mode: Literal["exact", "verified", "confidence", "jacobi"] | None = None
    threshold: Threshold | None = None
    window: Annotated[int, Field(ge=0, le=64)] | None = None
    quality: Annotated[str, Field(max_length=64)] | None = None
    quality_budget: Annotated[float, Field(ge=0, le=1)] | None = None
    timeout_s: Annotated[float, Field(gt=0)] | None = None


class AnswerBody(AnyAnswerBody, AnswerNoOps):
    """The fields of chats and completions."""

    max_tokens: TokenCount | None = None
    logit_bias: Biases | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[tuple[Token, ...], _FIRST, Field(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    # Another number of answers than `n`, of which the best ones are kept, is not supported.
    best_of: Annotated[int, Field(ge=1)] | None = None
    return_forwards: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, in whichever form they were given."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()


class TemplateFields(Wire):
    """The chat template's inputs besides messages."""

    tools: Annotated[tuple[ToolBody, ...], _FIRST, Field(max_length=MAX_TOOLS)] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: ThinkingSwitches | None = None

    @property
    def switches(self) -> Switches:
        """Its variables that have a value."""
        given = self.chat_template_kwargs or ThinkingSwitches()
        told = {**given.model_dump(), "reasoning_effort": self.reasoning_effort}
        return tuple((name, value) for name, value in told.items() if value is not None)


class ChatBody(AnswerBody, TemplateFields, ChatNoOps):
    """Body of a chat completion request."""

    messages: Messages
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class CompletionBody(AnswerBody, CompletionNoOps):
    """Body of a completion request: the text is continued as it is, without a chat template."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # 0: only with `echo`
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None  # default true; prompts that are tokens stay as they are


class TokenizeBody(Body, TemplateFields):
    """A text or a conversation to count."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None  # default true; a conversation has its template's
    messages: Messages | None = None
    add_generation_prompt: bool | None = None  # default true
    continue_final_message: Off | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Tokens to read."""

    model: str | None = None
    tokens: Annotated[tuple[Token, ...], _FIRST]


AnyBody = TypeVar("AnyBody", bound=Wire)


def parse(kind: type[AnyBody], body: bytes) -> AnyBody:
    """The checked body. Raises ApiError that names the first field at fault."""
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        # An unknown field of the body itself that is null is none.
        faults = [
            fault
            for fault in error.errors(include_url=False)
            if (fault["type"], len(fault["loc"]), fault["input"]) != ("extra_forbidden", 1, None)
        ]
        if faults:
            raise ApiError(_refusal(faults[0], kind)) from error
        parsed = kind.model_validate_json(body, extra="ignore")
    # Only after the check, which bounds the depth of the body.
    json.loads(body, object_pairs_hook=_once)
    return parsed


def _once(pairs: list[tuple[str, Any]]) -> None:
    """Raises ApiError if a field is given twice, because all but one would be ignored."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            refuse(name, f"'{name}' is given more than once")
        seen.add(name)


def _param(error: ErrorDetails) -> str:
    """The field at fault, without the marks of the variants that pydantic tried."""
    places: list[str] = []
    before = None
    for place in error["loc"]:
        is_kind = isinstance(before, int) and place in (*_NAMED, *_ITEM_KINDS)
        is_form = before in ("response_format", "format", ITEMS) and isinstance(place, str)
        if not (place in _VARIANTS or is_kind or is_form):
            places.append(str(place))
        before = place
    if error["type"].startswith("union_tag_"):
        places.append(error.get("ctx", {})["discriminator"].strip("'"))
    return ".".join(places)


def _refusal(error: ErrorDetails, kind: type[Wire]) -> ErrorInfo:
    if error["type"] == "json_invalid":
        return ErrorInfo(400, f"the body is not JSON: {error['msg']}", code="invalid_json")
    if not error["loc"]:
        return ErrorInfo(400, "the body must be a JSON object", code="invalid_json")
    param, said = _param(error), plain_words(error)
    if error["loc"][0] in no_ops_of(kind):
        message = f"'{param}' is not supported by this server; leave it out ({said})"
        return ErrorInfo(400, message, param, code="unsupported_parameter")
    if error["type"] in ("missing", "union_tag_not_found"):
        return ErrorInfo(400, f"'{param}' is missing", param, code="missing_required_parameter")
    if error["type"] == "extra_forbidden":
        message = f"'{param}' is not supported by this server"
        known = kind.model_fields if len(error["loc"]) == 1 else ()
        if param in _GUIDED:
            message += "; 'response_format' of a chat takes a JSON schema"
        elif close := get_close_matches(param, known, 1, _ALIKE):
            message += f"; did you mean '{close[0]}'?"
        return ErrorInfo(400, message, param, code="unsupported_parameter")
    return ErrorInfo(400, f"'{param}': {said}", param, code="invalid_value")
