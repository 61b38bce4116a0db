"""Answers as server-sent events: one or two of OpenAI's chunks per piece."""

import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mars_ray.serve.openai.replies import Shape, error_body, tool_call_delta, usage
from mars_ray.serve.openai.response_models import Tokens
from mars_ray.serve.protocol import ErrorInfo, Finish, GenerationRequest, Message, OutputDelta

logger = logging.getLogger(__name__)

DONE_DATA = "[DONE]"
DONE = f"data: {DONE_DATA}\n\n"


def event(data: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


@dataclass(slots=True)
class Chunks:
    """Writes the chunks of one call's answers."""

    call: GenerationRequest
    shape: Shape
    model: str
    created: int
    include_usage: bool
    forwards: bool = False  # each chunk states the forward of its tokens
    usage_so_far: bool = False  # each chunk has the usage up to it
    _finishes: dict[int, Finish] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)
    _said: set[int] = field(default_factory=set)  # choices that have had text or calls
    _prompts: dict[int, int] = field(default_factory=dict)  # tokens of each choice's prompt
    _tokens: Counter[int] = field(default_factory=Counter)  # of each choice, so far
    _shown: Counter[int] = field(default_factory=Counter)  # characters of each choice's tokens

    @property
    def is_over(self) -> bool:
        """Whether every choice has finished."""
        return len(self._finishes) == self.call.choices

    def of(self, piece: OutputDelta) -> Iterator[str]:
        """Yields a chunk with the addition of the piece, if it has any, and one for its finish."""
        first = piece.choice not in self._begun
        self._prompts[piece.choice] = piece.prompt_tokens
        self._tokens[piece.choice] += piece.tokens
        if piece.finish:  # which counts the end token, too
            self._tokens[piece.choice] = piece.finish.completion_tokens
        if piece.text or piece.calls or piece.reasoning:
            self._said.add(piece.choice)
        # A step whose text is held back adds nothing.
        has_more = piece.text or piece.reasoning or piece.logprobs
        if first or has_more or (self.forwards and piece.tokens):
            self._begun.add(piece.choice)
            yield self._chunk(piece.choice, self._addition(piece, first=first))
        for call in piece.calls:
            yield self._chunk(piece.choice, tool_call_delta(call))
        if piece.finish:
            self._finishes[piece.choice] = piece.finish
            # An empty answer without calls still has a text.
            text = None if piece.choice in self._said else ""
            ending = self.shape.delta(text, None, first=False)
            yield self._chunk(piece.choice, ending, piece.finish.reason)

    def _addition(self, piece: OutputDelta, *, first: bool) -> dict[str, Any]:
        logprobs = None if self.call.logprobs is None else piece.logprobs
        # The content of an answer of calls, or thoughts, only is null, not empty.
        may_be_null = self.call.tools or self.call.shows_reasoning is not None
        text = None if may_be_null and not piece.text else piece.text
        offset = self._shown[piece.choice]
        self._shown[piece.choice] += sum(len(token.text) for token in piece.logprobs)
        choice: dict[str, Any] = {
            **self.shape.delta(
                text, logprobs, first=first, offset=offset, reasoning=piece.reasoning
            )
        }
        if self.forwards:
            choice["mars"] = {"forward": piece.forward, "tokens": piece.tokens}
        return choice

    def end(self) -> str:
        """What follows the last chunk: one with the usage, if it is asked for, and the mark."""
        return (self.usage() if self.include_usage else "") + DONE

    def failed(self, error: ErrorInfo) -> str:
        """The event of an error, after which nothing comes."""
        return event(error_body(error))

    def usage(self) -> str:
        """The last chunk, with the usage."""
        finishes = [self._finishes[choice] for choice in range(self.call.choices)]
        return event(self._body([]) | {"usage": usage(self.call, finishes)})

    def _chunk(self, index: int, choice: Mapping[str, Any], reason: str | None = None) -> str:
        chunk = self._body([{"index": index, **choice, "finish_reason": reason}])
        if self.usage_so_far:
            return event(chunk | {"usage": self._so_far()})
        # If usage is requested, every chunk has the field, as clients of OpenAI's API expect.
        return event(chunk | {"usage": None} if self.include_usage else chunk)

    def _so_far(self) -> Tokens:
        # One prompt has `n` answers, which stand next to each other.
        prompts = {choice // self.call.n: count for choice, count in self._prompts.items()}
        prompt, completion = sum(prompts.values()), self._tokens.total()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.call.id,
            "object": self.shape.chunk_name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class Events(Protocol):
    """Writes the events of one request."""

    call: GenerationRequest

    @property
    def is_over(self) -> bool:
        """Whether every choice has finished."""
        ...

    def of(self, piece: OutputDelta) -> Iterator[str]:
        """Yields the events of a piece."""
        ...

    def end(self) -> str:
        """What follows the last event."""
        ...

    def failed(self, error: ErrorInfo) -> str:
        """The event of an error, after which nothing comes."""
        ...


class EventStream(StreamingResponse):
    """A response of events; however it ends, the events and the held resources are closed."""

    def __init__(
        self, events: AsyncGenerator[str, None], headers: dict[str, str], held: AsyncExitStack
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See StreamingResponse."""
        async with self._held, aclosing(self._events):
            await super().__call__(scope, receive, send)


async def stream(
    chunks: Events,
    first: Message,
    rest: AsyncIterator[Message],
    told: Callable[[Message], None] = lambda _: None,
) -> AsyncGenerator[str, None]:
    """Yields the events of a call; `told` is called with every message that they are made from.

    Events that arrive together are sent together, because every text is a message through two of
    Serve's processes. An error after the start is an event of its own and the last one: no [DONE]
    follows.
    """
    try:
        message = first
        while True:
            told(message)
            if isinstance(message, ErrorInfo):
                yield chunks.failed(message)
                return
            text = "".join(chunks.of(message))
            if chunks.is_over:
                break
            if text:
                yield text
            message = await anext(rest)
        yield text + chunks.end()
    except Exception:
        logger.exception("request %s failed while streaming", chunks.call.id)
        yield chunks.failed(internal_error(chunks.call.id))


def internal_error(request_id: str) -> ErrorInfo:
    """The error that a client gets for an internal fault."""
    message = f"internal error; the server's log has it under request {request_id}"
    return ErrorInfo(500, message, code="internal_error")
