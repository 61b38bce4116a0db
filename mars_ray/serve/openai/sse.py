"""Replies in OpenAI's shapes, for chats and completions: whole ones as JSON, others as server-sent
events (`serve/openai/response_models.py`; `responses.py` has those of `/v1/responses`).

A replica writes them from what its engine's steps add to the answers.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

from mars_ray.core.thresholds import Budget
from mars_ray.serve.openai.response_models import (
    AdapterUsage,
    ChatLogprobs,
    ChosenLogprob,
    ErrorReply,
    MarsUsage,
    TextLogprobs,
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
)

DONE_DATA = "[DONE]"
DONE = f"data: {DONE_DATA}\n\n"


# JSON as all replies are written.
to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(slots=True)
class Answer:
    """One choice in the making, from its deltas."""

    text: str = ""
    reasoning: str = ""
    logprobs: list[TokenText] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)  # the forward of each token
    calls: list[ToolCall] = field(default_factory=list)
    finish: Finish | None = None
    # What the events of a stream depend on besides its next delta.
    is_begun: bool = False
    has_content: bool = False  # text, thoughts or calls
    prompt_tokens: int = 0
    tokens: int = 0
    characters: int = 0  # of its tokens

    def add(self, delta: OutputDelta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.logprobs += delta.logprobs
        self.forwards += [delta.forward] * delta.tokens
        for more in delta.calls:
            if more.id is not None and more.name is not None:
                self.calls.append(ToolCall(more.id, more.name, ""))
            call = self.calls[more.index]
            self.calls[more.index] = replace(call, arguments=call.arguments + more.arguments)
        self.finish = delta.finish


class ReplyWriter:
    """Writes the reply to a chat or a completion."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._form = form = request.reply
        self._is_chat = form.route == "chat"
        kind = "chat.completion" if self._is_chat else "text_completion"
        if self._is_chat and form.is_streamed:
            kind = "chat.completion.chunk"
        self._head = {
            "id": request.id,
            "object": kind,
            "created": form.created,
            "model": form.model,
        }
        self._answers = [Answer() for _ in range(request.choices)]

    def write(self, delta: OutputDelta) -> str:
        """The events of an addition; empty for one that has none, or of a reply that is whole."""
        request, form, said = self._request, self._form, self._answers[delta.choice]
        if not form.is_streamed:
            said.add(delta)
            return ""
        finish = said.finish = delta.finish
        said.prompt_tokens = delta.prompt_tokens
        # The finish counts the end token, too.
        said.tokens = finish.completion_tokens if finish else said.tokens + delta.tokens
        said.has_content |= bool(delta.text or delta.calls or delta.reasoning)
        choices: list[dict[str, Any]] = []
        # A step whose text is held back adds nothing.
        has_more = delta.text or delta.reasoning or delta.logprobs
        if not said.is_begun or has_more or (form.by_step and delta.tokens):
            logprobs = None if request.logprobs is None else delta.logprobs
            if self._is_chat:
                added: dict[str, Any] = {} if said.is_begun else {"role": "assistant"}
                if delta.reasoning:
                    added["reasoning"] = added["reasoning_content"] = delta.reasoning
                # The content of an answer of calls, or thoughts, only is null, not empty.
                if delta.text or not (request.tools or request.shows_reasoning is not None):
                    added["content"] = delta.text
                choice = {"delta": added, "logprobs": _chat_logprobs(logprobs)}
            else:
                shown = _text_logprobs(logprobs, said.characters)
                choice = {"text": delta.text, "logprobs": shown}
                said.characters += sum(len(token.text) for token in delta.logprobs)
            if form.by_step:
                choice["mars"] = {"forward": delta.forward, "tokens": delta.tokens}
            said.is_begun = True
            choices.append(choice)
        for call in delta.calls:
            addition: dict[str, Any] = {"index": call.index}
            function = {"arguments": call.arguments}
            if call.id is not None:  # it begins
                addition |= {"id": call.id, "type": "function"}
                function = {"name": call.name, "arguments": call.arguments}
            addition["function"] = function
            choices.append({"delta": {"tool_calls": [addition]}, "logprobs": None})
        if finish and self._is_chat:
            # An empty answer without calls still has a text.
            empty = {} if said.has_content else {"content": ""}
            choices.append({"delta": empty, "logprobs": None})
        elif finish:
            choices.append({"text": "", "logprobs": None})
        tail: dict[str, Any] = {}
        if form.has_usage_so_far:
            tail["usage"] = self._usage_so_far()
        elif form.has_usage:
            # Every chunk has the field, as clients of OpenAI's API expect.
            tail["usage"] = None
        text = ""
        for choice in choices:
            reason = finish.reason if finish and choice is choices[-1] else None
            own = {"index": delta.choice, **choice, "finish_reason": reason}
            text += f"data: {to_json({**self._head, 'choices': [own], **tail})}\n\n"
        return text

    def _usage_so_far(self) -> dict[str, int]:
        # One prompt has `n` answers, which stand next to each other.
        of_prompts = {
            number // self._request.n: said.prompt_tokens
            for number, said in enumerate(self._answers)
            if said.prompt_tokens
        }
        prompt = sum(of_prompts.values())
        completion = sum(said.tokens for said in self._answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def end(self) -> str:
        """The text behind the last delta: usage, if a stream is to have it, or the whole reply."""
        finishes = [answer.finish for answer in self._answers if answer.finish]
        if not self._form.is_streamed:
            choices = [self._choice(index, answer) for index, answer in enumerate(self._answers)]
            made = {"choices": choices, "usage": usage(self._request, finishes)}
            return to_json({**self._head, **made})
        if not self._form.has_usage:
            return ""
        made = {"choices": [], "usage": usage(self._request, finishes)}
        return f"data: {to_json({**self._head, **made})}\n\n"

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        assert answer.finish
        choice: dict[str, Any] = {"index": index}
        shown = None if self._request.logprobs is None else answer.logprobs
        if self._is_chat:
            has_other = bool(answer.calls or answer.reasoning)
            content = None if has_other and not answer.text else answer.text
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if answer.reasoning:
                message["reasoning"] = message["reasoning_content"] = answer.reasoning
            if answer.calls:
                message["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in answer.calls
                ]
            choice |= {"message": message, "logprobs": _chat_logprobs(shown)}
        else:
            choice |= {"text": answer.text, "logprobs": _text_logprobs(shown)}
        choice["finish_reason"] = answer.finish.reason
        if self._form.by_step:
            choice["mars"] = {"forwards": answer.forwards}
        return choice


def usage(request: GenerationRequest, finishes: Sequence[Finish]) -> Usage:
    """OpenAI's usage, and under `mars` what multi-token decoding did; `finishes` by choice."""
    prompt = sum(finish.prompt_tokens for finish in finishes[:: request.n])
    completion = sum(finish.completion_tokens for finish in finishes)
    forwards = sum(finish.forwards for finish in finishes)
    # The lowest that was in force; None where a budget has moved it unseen.
    told = [finish.threshold for finish in finishes if finish.threshold is not None]
    is_unknown = finishes[-1].mode or isinstance(request.quality, Budget)
    threshold = min(told, default=None if is_unknown else request.mode.own_threshold)
    mars: MarsUsage = {
        "forwards": forwards,
        "tokens_per_forward": completion / forwards,
        "mode": finishes[-1].mode or request.mode.type,
        "threshold": threshold,
        "disagreement": sum(finish.disagreed for finish in finishes) / max(1, completion),
        "ngram_tokens": sum(finish.ngram_tokens for finish in finishes),
        "adapter": finishes[-1].served[-1].adapter if finishes[-1].served else None,
    }
    if len(by_adapter := _by_adapter(finishes)) > 1:
        mars["by_adapter"] = by_adapter
    made: Usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(finish.cached_tokens for finish in finishes[:: request.n])
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


def _chat_logprobs(logprobs: Sequence[TokenText] | None) -> ChatLogprobs | None:
    if logprobs is None:
        return None
    return {"content": [chosen_logprob(token) for token in logprobs], "refusal": None}


def chosen_logprob(token: TokenText) -> ChosenLogprob:
    """A token of an answer, and the likeliest ones in its place."""
    own, *top = (
        TokenLogprob(token=each.text, logprob=each.logprob or 0.0, bytes=list(each.bytes))
        for each in (token, *token.top)
    )
    return {**own, "top_logprobs": top}


def _text_logprobs(logprobs: Sequence[TokenText] | None, offset: int = 0) -> TextLogprobs | None:
    """`offset` is the number of characters of the tokens before these."""
    if logprobs is None:
        return None
    lengths = [len(token.text) for token in logprobs]
    top: list[dict[str, float] | None] = []
    for token in logprobs:
        # Of tokens with the same text, as parts of characters have, the chosen one counts, or else
        # the best. A prompt's first token has none.
        said: dict[str, float] = {}
        for other in (token, *token.top):
            if other.logprob is not None:
                said.setdefault(other.text, other.logprob)
        top.append(said or None)
    return {
        "tokens": [token.text for token in logprobs],
        "token_logprobs": [token.logprob for token in logprobs],
        "top_logprobs": top,
        "text_offset": list(accumulate(lengths, initial=offset))[:-1],
    }


def error_body(error: ErrorInfo) -> ErrorReply:
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    usual = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": kinds.get(error.status, usual),
            "param": error.param,
            "code": error.code,
        }
    }


def error_event(request: GenerationRequest, error: ErrorInfo, number: int) -> str:
    """The event of an error, after which nothing comes; `number` events came before it."""
    if request.reply.route != "response":
        return f"data: {to_json(error_body(error))}\n\n"
    said = error_body(error)["error"]
    data = {name: said[name] for name in ("code", "message", "param")}
    written = to_json({"type": "error", "sequence_number": number, **data})
    return f"event: error\ndata: {written}\n\n"


def internal_error(request_id: str) -> ErrorInfo:
    """The error that a client gets for an internal fault."""
    message = f"internal error; the server's log has it under request {request_id}"
    return ErrorInfo(500, message, code="internal_error")
