"""Bodies of replies, in OpenAI's shapes, for chats and for completions.

A reply's `usage.mars`, and `mars` of a choice if asked for, are ours.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

from mars_ray.config.modes import Mode
from mars_ray.serve.protocol import (
    ErrorInfo,
    Finish,
    GenerationRequest,
    OutputDelta,
    TokenText,
    ToolCall,
    ToolCallDelta,
)


def threshold_of(mode: Mode) -> float | None:
    """The threshold in force; some modes have none."""
    return getattr(mode, "threshold", None)


def usage(call: GenerationRequest, finishes: Sequence[Finish]) -> dict[str, Any]:
    """OpenAI's usage, and under `mars` what multi-token decoding did; `finishes` by choice."""
    prompt = sum(finish.prompt_tokens for finish in finishes[:: call.n])
    completion = sum(finish.completion_tokens for finish in finishes)
    forwards = sum(finish.forwards for finish in finishes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "mars": {
            "forwards": forwards,
            "tokens_per_forward": completion / forwards,
            "mode": finishes[-1].mode or call.mode.type,
            "threshold": _threshold(call, finishes),
            "disagreement": sum(finish.disagreed for finish in finishes) / completion,
        }
        | _adapters(finishes),
    }


def _adapters(finishes: Sequence[Finish]) -> dict[str, Any]:
    """The draft adapter that served; of several the last one, and what each has served."""
    tokens: Counter[str | None] = Counter()
    forwards: Counter[str | None] = Counter()
    for served in chain.from_iterable(finish.served for finish in finishes):
        tokens[served.adapter] += served.tokens
        forwards[served.adapter] += served.forwards
    last = finishes[-1].served[-1].adapter if finishes[-1].served else None
    if len(tokens) < 2:
        return {"adapter": last}
    each = [
        {"adapter": adapter, "completion_tokens": tokens[adapter], "forwards": forwards[adapter]}
        for adapter in tokens
    ]
    return {"adapter": last, "by_adapter": each}


def _threshold(call: GenerationRequest, finishes: Sequence[Finish]) -> float | None:
    """The lowest that was in force."""
    told = [finish.threshold for finish in finishes if finish.threshold is not None]
    return min(told, default=None if finishes[-1].mode else threshold_of(call.mode))


class Shape(Protocol):
    """How one API writes an answer."""

    name: str  # the reply's `object`
    chunk_name: str  # of a stream's chunks

    def whole(
        self, text: str, logprobs: Sequence[TokenText] | None, calls: Sequence[ToolCall]
    ) -> dict[str, Any]:
        """A choice's content, not streamed."""
        ...

    def delta(
        self,
        text: str | None,
        logprobs: Sequence[TokenText] | None,
        *,
        first: bool,
        offset: int = 0,
    ) -> dict[str, Any]:
        """A choice's content in a chunk; no text: nothing more to say.

        `offset`: so many characters of its tokens were in earlier chunks.
        """
        ...


class ChatShape:
    """`/v1/chat/completions`."""

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def whole(
        self, text: str, logprobs: Sequence[TokenText] | None, calls: Sequence[ToolCall]
    ) -> dict[str, Any]:
        """See Shape."""
        content = None if calls and not text else text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = [_tool_call(call) for call in calls]
        return {"message": message, "logprobs": _chat_logprobs(logprobs)}

    def delta(
        self,
        text: str | None,
        logprobs: Sequence[TokenText] | None,
        *,
        first: bool,
        offset: int = 0,
    ) -> dict[str, Any]:
        """See Shape."""
        delta = {"role": "assistant"} if first else {}
        delta |= {} if text is None else {"content": text}
        return {"delta": delta, "logprobs": _chat_logprobs(logprobs)}


class TextShape:
    """`/v1/completions`."""

    name = "text_completion"
    chunk_name = "text_completion"

    def whole(
        self, text: str, logprobs: Sequence[TokenText] | None, calls: Sequence[ToolCall]
    ) -> dict[str, Any]:
        """See Shape."""
        assert not calls, "there are no tools in this API"
        return {"text": text, "logprobs": _text_logprobs(logprobs)}

    def delta(
        self,
        text: str | None,
        logprobs: Sequence[TokenText] | None,
        *,
        first: bool,
        offset: int = 0,
    ) -> dict[str, Any]:
        """See Shape."""
        return {"text": text or "", "logprobs": _text_logprobs(logprobs, offset)}


def _chat_logprobs(logprobs: Sequence[TokenText] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    entries = [
        _entry(token) | {"top_logprobs": [_entry(other) for other in token.top]}
        for token in logprobs
    ]
    return {"content": entries, "refusal": None}


def tool_call_delta(piece: ToolCallDelta) -> dict[str, Any]:
    """What a chunk of a chat adds to a call."""
    added: dict[str, Any] = {"index": piece.index}
    if piece.name is not None:
        added |= {"id": piece.id, "type": "function"}
    name = {} if piece.name is None else {"name": piece.name}
    added["function"] = name | {"arguments": piece.arguments}
    return {"delta": {"tool_calls": [added]}, "logprobs": None}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _entry(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


def _text_logprobs(logprobs: Sequence[TokenText] | None, offset: int = 0) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    offsets = []
    for token in logprobs:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in logprobs],
        "token_logprobs": [token.logprob for token in logprobs],
        "top_logprobs": [_top_logprobs(token) for token in logprobs],
        "text_offset": offsets,
    }


def _top_logprobs(token: TokenText) -> dict[str, float]:
    """Of several that look alike, as parts of characters do, the chosen one or else the best."""
    said: dict[str, float] = {}
    for other in (token, *token.top):
        said.setdefault(other.text, other.logprob)
    return said


@dataclass(slots=True)
class Answer:
    """One choice in the making, from its pieces."""

    text: str = ""
    logprobs: list[TokenText] | None = None
    forwards: list[int] | None = None  # of each token
    calls: list[ToolCall] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, piece: OutputDelta) -> None:
        """The next piece."""
        self.text += piece.text
        for more in piece.calls:
            self._add_to_call(more)
        self.finish = piece.finish
        if self.logprobs is not None:
            self.logprobs += piece.logprobs
        if self.forwards is not None:
            self.forwards += [piece.forward] * piece.tokens

    def _add_to_call(self, piece: ToolCallDelta) -> None:
        if piece.id is not None and piece.name is not None:
            self.calls.append(ToolCall(piece.id, piece.name, ""))
        call = self.calls[piece.index]
        self.calls[piece.index] = replace(call, arguments=call.arguments + piece.arguments)


def reply(
    call: GenerationRequest, shape: Shape, model: str, created: int, answers: Sequence[Answer]
) -> dict[str, Any]:
    """Body of a reply that is not streamed."""
    choices, finishes = [], []
    for index, answer in enumerate(answers):
        assert answer.finish is not None
        finishes.append(answer.finish)
        choice = {"index": index} | shape.whole(answer.text, answer.logprobs, answer.calls)
        choice["finish_reason"] = answer.finish.reason
        if answer.forwards is not None:
            choice["mars"] = {"forwards": answer.forwards}
        choices.append(choice)
    return {
        "id": call.id,
        "object": shape.name,
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage(call, finishes),
    }


def model_list(models: Iterable[str], created: int) -> dict[str, Any]:
    """Body of the list of models."""
    entries = [
        {"id": model, "object": "model", "created": created, "owned_by": "mars-ray"}
        for model in models
    ]
    return {"object": "list", "data": entries}


def error_body(refusal: ErrorInfo) -> dict[str, Any]:
    """Body of an error."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    if refusal.status == 429:
        kind = "rate_limit_error"
    if refusal.status == 401:
        kind = "authentication_error"
    return {
        "error": {
            "message": refusal.message,
            "type": kind,
            "param": refusal.param,
            "code": refusal.code,
        }
    }
