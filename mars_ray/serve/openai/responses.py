"""`/v1/responses`: a chat in items, its bodies and its replies, whole and as events.

The service keeps nothing between two requests: what it returned may be handed back as input, and
`store` is answered as false. What would need a memory, or tools of its own, is refused by name.
The request is answered as the chat that it is, so all that holds for chats holds here.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

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
    Nothing,
    Off,
    ThinkingSwitches,
    TokenCount,
    ToolName,
    Wire,
    parse,
    refuse,
    text_or_items,
)
from mars_ray.serve.openai.sse import Answer, chosen_logprob, to_json, usage
from mars_ray.serve.protocol import (
    ErrorInfo,
    Finish,
    GenerationRequest,
    OutputDelta,
    TokenText,
    ToolCall,
    ToolCallDelta,
)

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


TextParts = Annotated[
    tuple[Annotated[InputText | OutputText, Field(discriminator="type")], ...], _FIRST
]
ItemContent = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[TextParts, Tag(ITEMS)], Discriminator(text_or_items)
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
    """The result of a call."""

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
    Discriminator(text_or_items),
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
    """The form of the text."""

    format: Annotated[PlainFormat | SchemaOfName, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Item):
    """How much the model should think. Thoughts are returned as they are, never summarised."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(Item):
    """Options of a stream."""

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
    """The chat that a request is. Raises ApiError, which names places of the chat (`renamed`)."""
    chat = body.model_dump(include=_OF_CHAT)
    chat["messages"] = _messages(body)
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["reasoning_effort"] = body.reasoning and body.reasoning.effort
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    match body.text and body.text.format:
        case PlainFormat(type=kind):
            chat["response_format"] = {"type": kind}
        case SchemaOfName() as named:
            schema = named.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    chat |= _tools(body)
    given = {name: value for name, value in chat.items() if value is not None}
    return parse(ChatBody, json.dumps(given).encode())


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


def _allowed(body: ResponsesBody) -> tuple[FunctionTool, ...]:
    """The tools that answers may call."""
    tools, choice = body.tools or (), body.tool_choice
    if not isinstance(choice, AllowedTools):
        return tools
    names = {tool.name for tool in choice.tools}
    return tuple(tool for tool in tools if tool.name in names)


def _tools(body: ResponsesBody) -> dict[str, Any]:
    choice, tools = body.tool_choice, _allowed(body)
    made: dict[str, Any] = {"tool_choice": choice}
    if isinstance(choice, ToolOfName):
        made["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif isinstance(choice, AllowedTools):
        if missing := {tool.name for tool in choice.tools} - {tool.name for tool in tools}:
            refuse("tool_choice", f"there is no tool {min(missing)!r} among 'tools'")
        made["tool_choice"] = choice.mode
    if tools:
        dumped = (tool.model_dump(exclude_none=True, exclude={"type"}) for tool in tools)
        made["tools"] = [{"type": "function", "function": function} for function in dumped]
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
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
            answer = None
            continue
        if answer is None:
            answer = {"role": "assistant"}
            messages.append(answer)
        if isinstance(item, MessageItem):
            answer["content"] = answer.get("content", "") + _text(item.content)
        elif isinstance(item, ReasoningItem):
            answer["reasoning"] = answer.get("reasoning", "") + item.text
        else:
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
    for message in messages:
        # Thoughts that nothing follows, as of an answer that was cut off.
        if message["role"] == "assistant" and not message.keys() & {"content", "tool_calls"}:
            message["content"] = ""
    return messages


Json = dict[str, Any]


def begun(body: ResponsesBody, request: GenerationRequest) -> Json:
    """The response as far as it is known before there is any output."""
    asked = body.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        "id": request.id,
        "object": "response",
        "created_at": request.reply.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": request.reply.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}} | asked.get("text", {}),
        "tool_choice": asked.get("tool_choice", "auto"),
        "tools": [
            {"description": None, "parameters": None, "strict": None} | tool
            for tool in asked.get("tools", ())
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _status(finish: Finish) -> str:
    return "incomplete" if finish.reason == "length" else "completed"


def _text_part(text: str, tokens: Sequence[TokenText]) -> Json:
    said = {"type": "output_text", "text": text, "annotations": []}
    return said | {"logprobs": [chosen_logprob(token) for token in tokens]}


class ResponseWriter:
    """Writes a response: whole, or as numbered events, in which items are finished one by one."""

    def __init__(self, request: GenerationRequest) -> None:
        assert request.reply.response is not None
        self._request = request
        self._begun: Json = request.reply.response
        self._count = 0  # of the items, whose ids are the request's with their number
        # Of a stream the item that is being written, else all of the answer.
        self._answer = Answer()
        self._number = 0
        self._kind = ""  # of that item; empty if there is none
        self._item: Json = {}
        self._output: list[Json] = []
        self._logprobs: list[TokenText] = []  # not yet in an event

    def write(self, delta: OutputDelta) -> str:
        """The events of an addition; none of a reply that is whole."""
        if self._request.reply.is_streamed:
            return "".join(self._events(delta))
        self._answer.add(delta)
        return ""

    def end(self) -> str:
        """The whole response; a stream's last event says that it is the last."""
        if self._request.reply.is_streamed:
            return ""
        answer = self._answer
        assert answer.finish
        status = _status(answer.finish)
        output: list[Json] = []
        if answer.reasoning:
            output.append(self._made("reasoning", status))
        if answer.text or not (answer.calls or answer.reasoning):
            output.append(self._made("message", status))
        output += [self._made("call", status, call) for call in answer.calls]
        return to_json(self._done(output, answer.finish))

    def _done(self, output: list[Json], finish: Finish) -> Json:
        is_cut = finish.reason == "length"
        made = usage(self._request, [finish])
        thoughts = made.get("completion_tokens_details", {"reasoning_tokens": 0})
        return self._begun | {
            "completed_at": self._begun["created_at"],
            "status": _status(finish),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": {
                "input_tokens": made["prompt_tokens"],
                "input_tokens_details": {**made["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": made["completion_tokens"],
                "output_tokens_details": dict(thoughts),
                "total_tokens": made["total_tokens"],
                "mars": made["mars"],
            },
        }

    def _events(self, delta: OutputDelta) -> Iterator[str]:
        if not self._number:
            yield self._event("response.created", {"response": self._begun})
            yield self._event("response.in_progress", {"response": self._begun})
        if self._request.logprobs is not None:
            self._logprobs += delta.logprobs
        # The rest of a call that is being written comes before what follows it.
        rest = list(takewhile(lambda call: call.id is None, delta.calls))
        yield from self._written(rest)
        if delta.reasoning:
            yield from self._open("reasoning")
            self._answer.reasoning += delta.reasoning
            data: Json = {"delta": delta.reasoning, "content_index": 0}
            yield self._place("response.reasoning_text.delta", data)
        if delta.text:
            yield from self._open("message")
            tokens, self._logprobs = self._logprobs, []
            self._answer.text += delta.text
            self._answer.logprobs += tokens
            said = [chosen_logprob(token) for token in tokens]
            data = {"delta": delta.text, "content_index": 0, "logprobs": said}
            yield self._place("response.output_text.delta", data)
        yield from self._written(delta.calls[len(rest) :])
        if delta.finish:
            if not (self._output or self._kind):
                yield from self._open("message")
            yield from self._close(_status(delta.finish))
            done = self._done(self._output, delta.finish)
            yield self._event(f"response.{done['status']}", {"response": done})

    def _written(self, calls: Iterable[ToolCallDelta]) -> Iterator[str]:
        """The events of additions to calls, each of which is an item."""
        for more in calls:
            if more.id is not None and more.name is not None:
                yield from self._close("completed")
                self._answer.calls = [ToolCall(more.id, more.name, "")]
                yield from self._open("call")
            if more.arguments:
                (call,) = self._answer.calls
                arguments = call.arguments + more.arguments
                self._answer.calls = [ToolCall(call.id, call.name, arguments)]
                name = "response.function_call_arguments.delta"
                yield self._place(name, {"delta": more.arguments})

    def _open(self, kind: str) -> Iterator[str]:
        """Begins an item of this kind, unless it is being written already."""
        if self._kind == kind:
            return
        if kind != "call":
            yield from self._close("completed")
        self._kind = kind
        self._item = self._made(kind, "in_progress")
        place = {"output_index": len(self._output)}
        yield self._event("response.output_item.added", place | {"item": self._item})
        if kind != "call":
            yield self._part("response.content_part.added", "")

    def _close(self, status: str) -> Iterator[str]:
        """Finishes the item that is being written, if there is one."""
        if not self._kind:
            return
        answer = self._answer
        if self._kind == "message":
            # What was held back behind the last text.
            answer.logprobs += self._logprobs
            self._logprobs = []
        match self._kind:
            case "reasoning":
                done: Json = {"text": answer.reasoning}
                yield self._place("response.reasoning_text.done", done | {"content_index": 0})
            case "message":
                said = [chosen_logprob(token) for token in answer.logprobs]
                done = {"text": answer.text, "logprobs": said, "content_index": 0}
                yield self._place("response.output_text.done", done)
            case _:
                (call,) = answer.calls
                done = {"arguments": call.arguments, "name": call.name}
                yield self._place("response.function_call_arguments.done", done)
        if self._kind != "call":
            text = answer.reasoning if self._kind == "reasoning" else answer.text
            yield self._part("response.content_part.done", text)
        item = self._made(self._kind, status)
        place = {"output_index": len(self._output)}
        yield self._event("response.output_item.done", place | {"item": item})
        self._output.append(item)
        self._kind, self._item, self._answer = "", {}, Answer()

    def _made(self, kind: str, status: str, call: ToolCall | None = None) -> Json:
        """An item of the answer as it stands: the one that is being written, or a new one."""
        answer, own_id = self._answer, self._item.get("id")
        if own_id is None:
            self._count += 1
            name = {"reasoning": "rs", "message": "msg"}.get(kind, "fc")
            own_id = f"{name}_{self._request.id.partition('_')[2]}{self._count:02d}"
        match kind:
            case "reasoning":
                text = answer.reasoning
                content = [{"type": "reasoning_text", "text": text}] if text else []
                item: Json = {"id": own_id, "type": "reasoning", "summary": [], "content": content}
                return item | {"encrypted_content": None, "status": status}
            case "message":
                is_begun = bool(answer.text) or status != "in_progress"
                content = [_text_part(answer.text, answer.logprobs)] if is_begun else []
                item = {"id": own_id, "type": "message", "role": "assistant"}
                return item | {"status": status, "content": content}
            case _:
                call = call or answer.calls[0]
                return {
                    "id": own_id,
                    "type": "function_call",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": call.arguments,
                    "status": status,
                }

    def _part(self, name: str, text: str) -> str:
        if self._kind == "reasoning":
            part: Json = {"type": "reasoning_text", "text": text}
        else:
            part = _text_part(text, self._answer.logprobs if text else ())
        return self._place(name, {"content_index": 0, "part": part})

    def _place(self, name: str, data: Json) -> str:
        """An event about the item that is being written."""
        place = {"item_id": self._item["id"], "output_index": len(self._output)}
        return self._event(name, place | data)

    def _event(self, name: str, data: Mapping[str, Any]) -> str:
        made = {"type": name, "sequence_number": self._number, **data}
        self._number += 1
        return f"event: {name}\ndata: {to_json(made)}\n\n"
