"""Bodies of `/v1/responses`, each of which is a chat in items.

The service keeps nothing between two requests: what it returned may be handed back as input, and
`store` is answered as false. What would need a memory, or tools of its own, is refused by name.
The request is answered as the chat that it is, so all that holds for chats holds here.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from mars_ray.serve.openai.no_op_fields import Nothing, Off
from mars_ray.serve.openai.request_models import (
    ITEMS,
    MAX_MESSAGES,
    MAX_TOOLS,
    TEXT,
    AnyAnswerBody,
    ApiError,
    Arguments,
    ChatBody,
    Effort,
    FunctionBody,
    NamedSchema,
    ThinkingSwitches,
    TokenCount,
    ToolName,
    parse,
    refuse,
)
from mars_ray.serve.openai.wire import Wire
from mars_ray.serve.protocol import ErrorInfo

LOGPROBS = "message.output_text.logprobs"
_FIRST = Field(fail_fast=True)
# Places of a chat and those here that set them, for errors that name one.
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
Status = Literal["in_progress", "completed", "incomplete"]


class Item(Wire):
    """Part of the input, also as the official client hands it back: null is a field not given."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"type": "null"}})

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # A list is no tuple once Python has seen it.
        given = {name: own for name, own in value.items() if own is not None}
        return {n: tuple(own) if isinstance(own, list) else own for n, own in given.items()}


class InputText(Item):
    """Text of the client or its user."""

    type: Literal["input_text"]
    text: str


class OutputText(Item):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Nothing | None = None
    logprobs: tuple[dict[str, Any], ...] | None = None


def _kind(value: Any) -> str:
    return ITEMS if isinstance(value, list | tuple) else TEXT


TextParts = Annotated[
    tuple[Annotated[InputText | OutputText, Field(discriminator="type")], ...], _FIRST
]
ItemContent = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[TextParts, Tag(ITEMS)], Discriminator(_kind)
]


def _text(content: str | Sequence[InputText | OutputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class MessageItem(Item):
    """A message of either side."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: ItemContent
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Item):
    """A call of a function that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: Arguments = "{}"
    id: str | None = None
    status: Status | None = None


class ResultItem(Item):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: ItemContent
    id: str | None = None
    status: Status | None = None


class ReasoningPart(Item):
    """A piece of thoughts, or of their summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Item):
    """Thoughts before an earlier answer."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[tuple[ReasoningPart, ...], _FIRST] | None = None
    content: Annotated[tuple[ReasoningPart, ...], _FIRST] | None = None
    encrypted_content: str | None = None  # of another service: it cannot be read here
    status: Status | None = None

    @property
    def text(self) -> str:
        """The thoughts themselves where there are any, else their summary."""
        return "".join(part.text for part in self.content or self.summary or ())


def _item_kind(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("type") or "message")
    return str(getattr(value, "type", "message"))


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_kind),
]
Input = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[
        tuple[AnyItem, ...], _FIRST, Field(min_length=1, max_length=MAX_MESSAGES), Tag(ITEMS)
    ],
    Discriminator(_kind),
]


class FunctionTool(Item, FunctionBody):
    """A function that answers may call; tools that the service itself would run are none."""

    type: Literal["function"]


class ToolOfName(Item):
    """A function, by its name."""

    type: Literal["function"]
    name: ToolName


class AllowedTools(Item):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[tuple[ToolOfName, ...], _FIRST, Field(min_length=1, max_length=MAX_TOOLS)]


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)]
    | Annotated[Annotated[ToolOfName | AllowedTools, Field(discriminator="type")], Tag(ITEMS)],
    Discriminator(lambda value: TEXT if isinstance(value, str) else ITEMS),
]


class PlainFormat(Item):
    """Asks for any text, or for any JSON object."""

    type: Literal["text", "json_object"]


class SchemaOfName(Item, NamedSchema):
    """Asks for JSON of one schema."""

    type: Literal["json_schema"]


class TextOptions(Item):
    """What the text must be."""

    format: Annotated[PlainFormat | SchemaOfName, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Item):
    """How much the model should think. Thoughts are returned as they are, never summarised."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(Item):
    """What a stream contains besides events."""

    include_obfuscation: Off | None = None


class ResponsesBody(AnyAnswerBody):
    """Body of a response request."""

    input: Input
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[tuple[FunctionTool, ...], _FIRST, Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: ResponsesStreamOptions | None = None
    # Without effect: nothing is stored, and beginnings of prompts are shared anyway.
    store: bool | None = None
    include: Annotated[tuple[str, ...], _FIRST, Field(max_length=16)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    background: Off | None = None
    chat_template_kwargs: ThinkingSwitches | None = None  # not in OpenAI's API


_OF_CHAT = {*AnyAnswerBody.model_fields, "parallel_tool_calls", "chat_template_kwargs"}
_NEEDS_A_MEMORY = ("previous_response_id", "conversation", "prompt")


def parse_responses(raw: bytes) -> ResponsesBody:
    """The checked body. Raises ApiError that names the first field at fault."""
    try:
        return parse(ResponsesBody, raw)
    except ApiError as error:
        raise ApiError(_explained(error.refusal, raw)) from error


def _explained(refusal: ErrorInfo, raw: bytes) -> ErrorInfo:
    """The refusal, with what to do instead where a client is likely to ask for it."""
    param = refusal.param or ""
    if param in _NEEDS_A_MEMORY:
        message = (
            f"'{param}' is not supported by this server, which keeps nothing between requests: "
            "hand the earlier items back in 'input'"
        )
        return replace(refusal, message=message, code="unsupported_parameter")
    outer, _, rest = param.partition(".")
    number = rest.partition(".")[0]
    if outer in ("tools", "input") and number.isdecimal():
        part = json.loads(raw)[outer][int(number)]
        kind, place = part.get("type") if isinstance(part, dict) else None, f"{outer}.{number}"
        message = ""
        if outer == "tools" and isinstance(kind, str) and kind != "function":
            message = f"'{place}': tools of type {kind!r} would run in the service; it has none"
        elif kind == "item_reference":
            message = f"'{place}': nothing is stored that could be referred to; hand the item back"
        if message:
            return replace(refusal, message=message, param=place, code="unsupported_parameter")
    return refusal


def to_chat(body: ResponsesBody) -> ChatBody:
    """The chat that a request is. Raises ApiError."""
    chat = body.model_dump(include=_OF_CHAT)
    chat["messages"] = _messages(body)
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["reasoning_effort"] = body.reasoning and body.reasoning.effort
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.text and body.text.format:
        chat["response_format"] = _response_format(body.text.format)
    chat |= _tools(body)
    given = {name: value for name, value in chat.items() if value is not None}
    try:
        return parse(ChatBody, json.dumps(given).encode())
    except ApiError as error:
        raise renamed(error, body) from error


def renamed(error: ApiError, body: ResponsesBody) -> ApiError:
    """An error of the chat, in the words of the request that it was made of."""
    refusal = error.refusal
    if refusal.param is None:
        return error
    param = _own_place(refusal.param, body)
    message = refusal.message.replace(f"'{refusal.param}'", f"'{param}'")
    return ApiError(replace(refusal, message=message, param=param))


def _own_place(place: str, body: ResponsesBody) -> str:
    match place.split("."):
        case ["messages", *_]:  # their numbers are not those of the items
            return "input"
        case ["tools", number, "function", *rest] if number.isdecimal():
            numbers = [n for n, tool in enumerate(body.tools or ()) if tool in _allowed(body)]
            return ".".join(["tools", str(numbers[int(number)]), *rest])
    for name, own in _NAMES.items():
        if place == name or place.startswith(f"{name}."):
            return own + place.removeprefix(name)
    return place


def _response_format(asked: PlainFormat | SchemaOfName) -> dict[str, Any]:
    if isinstance(asked, PlainFormat):
        return {"type": asked.type}
    named = asked.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"type": "json_schema", "json_schema": named}


def _allowed(body: ResponsesBody) -> tuple[FunctionTool, ...]:
    """The tools that answers may call."""
    tools, choice = body.tools or (), body.tool_choice
    if not isinstance(choice, AllowedTools):
        return tools
    names = {tool.name for tool in choice.tools}
    return tuple(tool for tool in tools if tool.name in names)


def _tools(body: ResponsesBody) -> dict[str, Any]:
    """The chat's tools and choice of a tool."""
    choice, tools = body.tool_choice, _allowed(body)
    made: dict[str, Any] = {"tool_choice": choice}
    match choice:
        case ToolOfName():
            function = {"name": choice.name}
            made["tool_choice"] = {"type": "function", "function": function}
        case AllowedTools():
            missing = {tool.name for tool in choice.tools} - {tool.name for tool in tools}
            if missing:
                refuse("tool_choice", f"there is no tool {min(missing)!r} among 'tools'")
            made["tool_choice"] = choice.mode
        case _:
            pass
    if tools:
        made["tools"] = [
            {
                "type": "function",
                "function": tool.model_dump(exclude_none=True, exclude={"type"}),
            }
            for tool in tools
        ]
    return made


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """The chat's messages: thoughts, text and calls of an answer, which are items in a row here,
    are one message there."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    answer: dict[str, Any] | None = None
    for item in body.input:
        if isinstance(item, ResultItem):
            result = {"tool_call_id": item.call_id, "content": _text(item.output)}
            messages.append({"role": "tool"} | result)
            answer = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
            answer = None
        else:
            if answer is None:
                answer = {"role": "assistant"}
                messages.append(answer)
            _add(answer, item)
    for message in messages:
        # Thoughts that nothing follows, as of an answer that was cut off.
        if message["role"] == "assistant" and not message.keys() & {"content", "tool_calls"}:
            message["content"] = ""
    return messages


def _add(answer: dict[str, Any], item: MessageItem | CallItem | ReasoningItem) -> None:
    match item:
        case MessageItem():
            answer["content"] = answer.get("content", "") + _text(item.content)
        case ReasoningItem():
            answer["reasoning"] = answer.get("reasoning", "") + item.text
        case CallItem():
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
