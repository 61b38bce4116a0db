"""Replies of `/v1/responses`, whole and as its events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mars_ray.serve.openai.replies import Answer, error_body, usage
from mars_ray.serve.openai.responses_request import ResponsesBody
from mars_ray.serve.protocol import (
    ErrorInfo,
    Finish,
    GenerationRequest,
    OutputDelta,
    TokenText,
    ToolCall,
)

Json = dict[str, Any]


def response(
    body: ResponsesBody,
    call: GenerationRequest,
    model: str,
    created: int,
    output: list[Json],
    finish: Finish | None,
) -> Json:
    """The whole response, or one in the making if there is no finish."""
    is_cut = finish is not None and finish.reason == "length"
    status = "in_progress" if finish is None else "incomplete" if is_cut else "completed"
    asked = body.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        "id": call.id,
        "object": "response",
        "created_at": created,
        "completed_at": created if finish else None,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": output,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": call.sampling.temperature,
        "text": {"format": {"type": "text"}} | asked.get("text", {}),
        "tool_choice": asked.get("tool_choice", "auto"),
        "tools": [_tool(tool) for tool in asked.get("tools", ())],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": call.sampling.top_p,
        "truncation": "disabled",
        "usage": _usage(call, finish) if finish else None,
        "user": body.user,
    }


def _tool(asked: Json) -> Json:
    return {"description": None, "parameters": None, "strict": None} | asked


def _usage(call: GenerationRequest, finish: Finish) -> Json:
    made = usage(call, [finish])
    thoughts = made.get("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "input_tokens": made["prompt_tokens"],
        "input_tokens_details": {**made["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": made["completion_tokens"],
        "output_tokens_details": dict(thoughts),
        "total_tokens": made["total_tokens"],
        "mars": made["mars"],
    }


def whole(
    body: ResponsesBody, call: GenerationRequest, model: str, created: int, answer: Answer
) -> Json:
    """Body of a reply that is not streamed."""
    assert answer.finish
    items = _Items(call)
    status = _status(answer.finish)
    output: list[Json] = []
    if answer.reasoning:
        output.append(items.reasoning(answer.reasoning, status))
    if answer.text or not (answer.calls or answer.reasoning):
        output.append(items.message(answer.text, answer.logprobs or (), status))
    output += [items.call(call, status) for call in answer.calls]
    return response(body, call, model, created, output, answer.finish)


def _status(finish: Finish) -> str:
    return "incomplete" if finish.reason == "length" else "completed"


@dataclass(slots=True)
class _Items:
    """Makes the items of an output, whose ids are those of the request with a number."""

    request: GenerationRequest
    _count: int = 0

    def _id(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self.request.id.partition('_')[2]}{self._count:02d}"

    def reasoning(self, text: str, status: str, own_id: str | None = None) -> Json:
        content = [{"type": "reasoning_text", "text": text}] if text else []
        own = {"id": own_id or self._id("rs"), "type": "reasoning", "summary": []}
        return {**own, "content": content, "encrypted_content": None, "status": status}

    def message(
        self, text: str, tokens: Sequence[TokenText], status: str, own_id: str | None = None
    ) -> Json:
        own = {"id": own_id or self._id("msg"), "type": "message", "role": "assistant"}
        is_begun = bool(text) or status != "in_progress"
        content = [_text_part(text, tokens)] if is_begun else []
        return {**own, "status": status, "content": content}

    def call(self, call: ToolCall, status: str, own_id: str | None = None) -> Json:
        return {
            "id": own_id or self._id("fc"),
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": status,
        }


def _text_part(text: str, tokens: Sequence[TokenText]) -> Json:
    said = {"type": "output_text", "text": text, "annotations": []}
    return said | {"logprobs": [_logprob(token) for token in tokens]}


def _logprob(token: TokenText) -> Json:
    own = {"token": token.text, "bytes": list(token.bytes), "logprob": token.logprob}
    top = [
        {"token": other.text, "bytes": list(other.bytes), "logprob": other.logprob}
        for other in token.top
    ]
    return own | {"top_logprobs": top}


@dataclass(slots=True)
class ResponseEvents:
    """Writes the events of a response, which are numbered; items are finished one by one."""

    call: GenerationRequest
    body: ResponsesBody
    model: str
    created: int
    _number: int = 0
    _answer: Answer = field(default_factory=Answer)  # the item that is being written
    _kind: str = ""  # of that item; empty if there is none
    _item: Json = field(default_factory=dict)
    _output: list[Json] = field(default_factory=list)
    _is_begun: bool = False
    _logprobs: list[TokenText] = field(default_factory=list)  # not yet in an event
    _items: _Items = field(init=False)
    _is_over: bool = False

    def __post_init__(self) -> None:
        self._items = _Items(self.call)

    @property
    def is_over(self) -> bool:
        """Whether the response has finished."""
        return self._is_over

    def of(self, piece: OutputDelta) -> Iterator[str]:
        """Yields the events of the piece."""
        if not self._is_begun:
            self._is_begun = True
            begun = response(self.body, self.call, self.model, self.created, [], None)
            yield self._event("response.created", {"response": begun})
            yield self._event("response.in_progress", {"response": begun})
        if self.call.logprobs is not None:
            self._logprobs += piece.logprobs
        if piece.reasoning:
            yield from self._open("reasoning")
            self._answer.reasoning += piece.reasoning
            yield self._delta("response.reasoning_text.delta", piece.reasoning, content_index=0)
        if piece.text:
            yield from self._text(piece.text)
        for more in piece.calls:
            if more.id is not None and more.name is not None:
                yield from self._close("completed")
                self._answer.calls = [ToolCall(more.id, more.name, "")]
                yield from self._open("call")
            if more.arguments:
                (call,) = self._answer.calls
                arguments = call.arguments + more.arguments
                self._answer.calls = [ToolCall(call.id, call.name, arguments)]
                name = "response.function_call_arguments.delta"
                yield self._delta(name, more.arguments)
        if piece.finish:
            yield from self._end(piece.finish)

    def _text(self, text: str) -> Iterator[str]:
        yield from self._open("message")
        tokens, self._logprobs = self._logprobs, []
        self._answer.text += text
        self._answer.logprobs = [*(self._answer.logprobs or ()), *tokens]
        said = [_logprob(token) for token in tokens]
        yield self._delta("response.output_text.delta", text, content_index=0, logprobs=said)

    def _end(self, finish: Finish) -> Iterator[str]:
        if not (self._output or self._kind):
            yield from self._open("message")
        yield from self._close(_status(finish))
        self._is_over = True
        done = response(self.body, self.call, self.model, self.created, self._output, finish)
        yield self._event(f"response.{done['status']}", {"response": done})

    def end(self) -> str:
        """Nothing: the last event says that it is the last."""
        return ""

    def failed(self, error: ErrorInfo) -> str:
        """The event of an error, after which nothing comes."""
        said = error_body(error)["error"]
        return self._event("error", {name: said[name] for name in ("code", "message", "param")})

    def _open(self, kind: str) -> Iterator[str]:
        """Begins an item of this kind, unless it is being written already."""
        if self._kind == kind:
            return
        if kind != "call":
            yield from self._close("completed")
        self._kind = kind
        self._item = self._made("in_progress")
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
            answer.logprobs = [*(answer.logprobs or ()), *self._logprobs]
            self._logprobs = []
        match self._kind:
            case "reasoning":
                done: Json = {"text": answer.reasoning}
                yield self._place("response.reasoning_text.done", done | {"content_index": 0})
            case "message":
                said = [_logprob(token) for token in answer.logprobs or ()]
                done = {"text": answer.text, "logprobs": said, "content_index": 0}
                yield self._place("response.output_text.done", done)
            case _:
                (call,) = answer.calls
                done = {"arguments": call.arguments, "name": call.name}
                yield self._place("response.function_call_arguments.done", done)
        if self._kind != "call":
            text = answer.reasoning if self._kind == "reasoning" else answer.text
            yield self._part("response.content_part.done", text)
        item = self._made(status)
        place = {"output_index": len(self._output)}
        yield self._event("response.output_item.done", place | {"item": item})
        self._output.append(item)
        self._kind, self._item, self._answer = "", {}, Answer()

    def _made(self, status: str) -> Json:
        """The item that is being written, as it stands."""
        answer, own_id = self._answer, self._item.get("id")
        match self._kind:
            case "reasoning":
                return self._items.reasoning(answer.reasoning, status, own_id)
            case "message":
                return self._items.message(answer.text, answer.logprobs or (), status, own_id)
            case _:
                return self._items.call(answer.calls[0], status, own_id)

    def _part(self, name: str, text: str) -> str:
        if self._kind == "reasoning":
            part: Json = {"type": "reasoning_text", "text": text}
        else:
            part = _text_part(text, (self._answer.logprobs or ()) if text else ())
        return self._place(name, {"content_index": 0, "part": part})

    def _delta(self, name: str, delta: str, **more: Any) -> str:
        return self._place(name, {"delta": delta, **more})

    def _place(self, name: str, data: Json) -> str:
        """An event about the item that is being written."""
        place = {"item_id": self._item["id"], "output_index": len(self._output)}
        return self._event(name, place | data)

    def _event(self, name: str, data: Mapping[str, Any]) -> str:
        made = {"type": name, "sequence_number": self._number, **data}
        self._number += 1
        written = json.dumps(made, ensure_ascii=False, separators=(",", ":"))
        return f"event: {name}\ndata: {written}\n\n"
