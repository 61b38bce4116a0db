"""Replies in OpenAI's shapes, for chats and for completions (`serve/openai/response_models.py`)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

from mars_ray.core.thresholds import Budget
from mars_ray.serve.openai.response_models import (
    AdapterUsage,
    ChatAddition,
    ChatAnswer,
    ChatContent,
    ChatDelta,
    ChatLogprobs,
    ChatReply,
    ChosenLogprob,
    ChunkFunction,
    ChunkToolCall,
    ErrorReply,
    MarsUsage,
    ModelEntry,
    ModelsReply,
    SaidFunction,
    SaidToolCall,
    TextContent,
    TextLogprobs,
    TextReply,
    TokenLogprob,
    Usage,
)
from mars_ray.serve.protocol import (
    ErrorInfo,
    Finish,
    GenerationRequest,
    OutputDelta,
    TokenText,
    ToolCall,
    ToolCallDelta,
)


def usage(call: GenerationRequest, finishes: Sequence[Finish]) -> Usage:
    """OpenAI's usage, and under `mars` what multi-token decoding did; `finishes` by choice."""
    prompt = sum(finish.prompt_tokens for finish in finishes[:: call.n])
    completion = sum(finish.completion_tokens for finish in finishes)
    forwards = sum(finish.forwards for finish in finishes)
    mars: MarsUsage = {
        "forwards": forwards,
        "tokens_per_forward": completion / forwards,
        "mode": finishes[-1].mode or call.mode.type,
        "threshold": _threshold(call, finishes),
        "disagreement": sum(finish.disagreed for finish in finishes) / completion,
        "adapter": finishes[-1].served[-1].adapter if finishes[-1].served else None,
    }
    if len(by_adapter := _by_adapter(finishes)) > 1:
        mars["by_adapter"] = by_adapter
    made: Usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(finish.cached_tokens for finish in finishes[:: call.n])
        },
        "mars": mars,
    }
    thoughts = [f.reasoning_tokens for f in finishes if f.reasoning_tokens is not None]
    if thoughts:
        made["completion_tokens_details"] = {"reasoning_tokens": sum(thoughts)}
    return made


def _by_adapter(finishes: Sequence[Finish]) -> list[AdapterUsage]:
    """The counts of each draft adapter, in the order of their first tokens."""
    tokens: Counter[str | None] = Counter()
    forwards: Counter[str | None] = Counter()
    for served in chain.from_iterable(finish.served for finish in finishes):
        tokens[served.adapter] += served.tokens
        forwards[served.adapter] += served.forwards
    return [
        {"adapter": adapter, "completion_tokens": tokens[adapter], "forwards": forwards[adapter]}
        for adapter in tokens
    ]


def _threshold(call: GenerationRequest, finishes: Sequence[Finish]) -> float | None:
    """The lowest threshold that was in force; None where a budget has moved it unseen."""
    told = [finish.threshold for finish in finishes if finish.threshold is not None]
    unknown = finishes[-1].mode or isinstance(call.quality, Budget)
    return min(told, default=None if unknown else call.mode.own_threshold)


@dataclass(slots=True)
class Answer:
    """One choice in the making, from its pieces."""

    text: str = ""
    reasoning: str = ""
    logprobs: list[TokenText] | None = None
    forwards: list[int] | None = None  # the forward of each token
    calls: list[ToolCall] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, piece: OutputDelta) -> None:
        """Adds the next piece."""
        self.text += piece.text
        self.reasoning += piece.reasoning
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


class ChatShape:
    """The format of answers of `/v1/chat/completions`."""

    name = "chat.completion"  # the reply's `object`
    chunk_name = "chat.completion.chunk"

    def whole(self, answer: Answer) -> ChatContent:
        """The content of a choice that is not streamed."""
        has_other = bool(answer.calls or answer.reasoning)
        content = None if has_other and not answer.text else answer.text
        message: ChatAnswer = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message["reasoning"] = message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_tool_call(call) for call in answer.calls]
        return {"message": message, "logprobs": _chat_logprobs(answer.logprobs)}

    def delta(
        self,
        text: str | None,
        logprobs: Sequence[TokenText] | None,
        *,
        first: bool,
        offset: int = 0,
        reasoning: str = "",
    ) -> ChatAddition:
        """A choice's content in a chunk; `text` is None if there is nothing more to add.

        `offset` is the number of characters of its tokens in earlier chunks.
        """
        delta: ChatDelta = {"role": "assistant"} if first else {}
        if reasoning:
            delta["reasoning"] = delta["reasoning_content"] = reasoning
        if text is not None:
            delta["content"] = text
        return {"delta": delta, "logprobs": _chat_logprobs(logprobs)}


class TextShape:
    """The format of answers of `/v1/completions`."""

    name = chunk_name = "text_completion"

    def whole(self, answer: Answer) -> TextContent:
        """See ChatShape."""
        assert not answer.calls, "there are no tools in this API"
        return {"text": answer.text, "logprobs": _text_logprobs(answer.logprobs)}

    def delta(
        self,
        text: str | None,
        logprobs: Sequence[TokenText] | None,
        *,
        first: bool,
        offset: int = 0,
        reasoning: str = "",
    ) -> TextContent:
        """See ChatShape."""
        assert not reasoning, "nobody tells thoughts apart in this API"
        return {"text": text or "", "logprobs": _text_logprobs(logprobs, offset)}


Shape = ChatShape | TextShape


def tool_call_delta(piece: ToolCallDelta) -> ChatAddition:
    """The addition of a chat's chunk to a call."""
    added: ChunkToolCall = {"index": piece.index, "function": {"arguments": piece.arguments}}
    if piece.id is not None and piece.name is not None:
        function: ChunkFunction = {"name": piece.name, "arguments": piece.arguments}
        added = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
    return {"delta": {"tool_calls": [added]}, "logprobs": None}


def _tool_call(call: ToolCall) -> SaidToolCall:
    function: SaidFunction = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _chat_logprobs(logprobs: Sequence[TokenText] | None) -> ChatLogprobs | None:
    if logprobs is None:
        return None
    content: list[ChosenLogprob] = [
        {**_logprob(token), "top_logprobs": [_logprob(other) for other in token.top]}
        for token in logprobs
    ]
    return {"content": content, "refusal": None}


def _logprob(token: TokenText) -> TokenLogprob:
    assert token.logprob is not None, "chats echo no prompt"
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


def _text_logprobs(logprobs: Sequence[TokenText] | None, offset: int = 0) -> TextLogprobs | None:
    if logprobs is None:
        return None
    lengths = [len(token.text) for token in logprobs]
    return {
        "tokens": [token.text for token in logprobs],
        "token_logprobs": [token.logprob for token in logprobs],
        "top_logprobs": [_top_logprobs(token) for token in logprobs],
        "text_offset": list(accumulate(lengths, initial=offset))[:-1],
    }


def _top_logprobs(token: TokenText) -> dict[str, float] | None:
    """Log-probabilities by text; None for a prompt's first token. Among tokens with the same text,
    as parts of characters have, the chosen one counts, or else the best."""
    said: dict[str, float] = {}
    for other in (token, *token.top):
        if other.logprob is not None:
            said.setdefault(other.text, other.logprob)
    return said or None


def reply(
    call: GenerationRequest, shape: Shape, model: str, created: int, answers: Sequence[Answer]
) -> ChatReply | TextReply:
    """Body of a reply that is not streamed."""
    choices: list[Any] = []
    finishes: list[Finish] = []
    for index, answer in enumerate(answers):
        assert answer.finish is not None
        choice = {"index": index, **shape.whole(answer), "finish_reason": answer.finish.reason}
        if answer.forwards is not None:
            choice["mars"] = {"forwards": answer.forwards}
        choices.append(choice)
        finishes.append(answer.finish)
    # `Any`, because one literal serves both kinds of replies; tests check it.
    made: Any = {
        "id": call.id,
        "object": shape.name,
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage(call, finishes),
    }
    return made


def model_list(models: Iterable[str], created: int) -> ModelsReply:
    """Body of the list of models."""
    return {"object": "list", "data": [model_entry(model, created) for model in models]}


def model_entry(model: str, created: int) -> ModelEntry:
    """A model of the list."""
    return {"id": model, "object": "model", "created": created, "owned_by": "mars-ray"}


def error_body(refusal: ErrorInfo) -> ErrorReply:
    """Body of an error."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    usual = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {
        "error": {
            "message": refusal.message,
            "type": kinds.get(refusal.status, usual),
            "param": refusal.param,
            "code": refusal.code,
        }
    }
