"""An answer as server-sent events: one event per engine step, in OpenAI's chunks."""

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from mars_ray.serve.messages import ChatCall, Finish, Message, Piece, Refusal
from mars_ray.serve.protocol import error_body, usage

logger = logging.getLogger(__name__)

DONE = "data: [DONE]\n\n"


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


@dataclass(frozen=True, slots=True)
class Chunks:
    """Writes the chunks of one answer."""

    call: ChatCall
    model: str
    created: int
    include_usage: bool

    def delta(self, delta: dict[str, str], finish_reason: str | None = None) -> str:
        """A chunk that adds to the answer, or ends it."""
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        chunk = self._chunk([choice])
        # With usage asked for, every chunk has the field: clients of OpenAI's API expect that.
        return event(chunk | {"usage": None} if self.include_usage else chunk)

    def usage(self, finish: Finish) -> str:
        """The chunk after the last one of text."""
        return event(self._chunk([]) | {"usage": usage(self.call, finish)})

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.call.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


async def events(
    chunks: Chunks, first: Message, rest: AsyncGenerator[Message, None]
) -> AsyncIterator[str]:
    """The events of an answer; `rest` is closed when the client goes away.

    An error after the start is an event of its own, and the last one: there is no [DONE].
    """
    async with aclosing(rest):
        try:
            yield chunks.delta({"role": "assistant", "content": _text(first)})
            message = first
            while isinstance(message, Piece) and message.finish is None:
                message = await anext(rest)
                # A step whose text is held back has nothing to say.
                if text := _text(message):
                    yield chunks.delta({"content": text})
            for last in _end(chunks, message):
                yield last
        except Exception:
            logger.exception("request %s failed while streaming", chunks.call.id)
            yield event(error_body(internal_error(chunks.call.id)))


def _text(message: Message) -> str:
    return message.text if isinstance(message, Piece) else ""


def _end(chunks: Chunks, last: Message) -> Iterator[str]:
    if isinstance(last, Refusal):
        yield event(error_body(last))
        return
    assert last.finish is not None
    yield chunks.delta({}, last.finish.reason)
    if chunks.include_usage:
        yield chunks.usage(last.finish)
    yield DONE


def internal_error(request_id: str) -> Refusal:
    """What a client learns of a fault of ours."""
    message = f"internal error; the server's log has it under request {request_id}"
    return Refusal(500, message, code="internal_error")
