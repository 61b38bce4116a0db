"""Server-sent events: one per engine step, in OpenAI's chunks."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from starlette.requests import ClientDisconnect

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import VerifiedMode
from mars_ray.serve.openai.replies import ChatShape, TextShape
from mars_ray.serve.openai.sse import DONE, Chunks, EventStream, stream
from mars_ray.serve.protocol import (
    ErrorInfo,
    Finish,
    GenerationRequest,
    Message,
    OutputDelta,
    TokenText,
    Turn,
)

CALL = GenerationRequest("id", ((Turn("user", "hi"),),), VerifiedMode(), Sampling(), None, 100)
FINISH = Finish("stop", prompt_tokens=3, completion_tokens=4, forwards=2)


class Source:
    """Gives messages, raises what is an exception, and remembers that it was closed."""

    def __init__(self, *messages: Message | Exception) -> None:
        self.messages = messages
        self.closed = False

    async def rest(self) -> AsyncGenerator[Message, None]:
        try:
            for message in self.messages:
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            self.closed = True


async def collect(source: Source, include_usage: bool, take: int | None = None) -> list[str]:
    """The events that a client reads, which leaves after `take` of them."""
    rest, held, got = source.rest(), AsyncExitStack(), []
    await held.enter_async_context(aclosing(rest))
    written = stream(Chunks(CALL, ChatShape(), "m", 1, include_usage), await anext(rest), rest)

    async def receive() -> dict:
        await asyncio.Event().wait()
        return {}

    async def send(message) -> None:
        if message.get("body"):
            got.append(message["body"].decode())
        if len(got) == take:
            raise OSError("the client is gone")

    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    with contextlib.suppress(ClientDisconnect):
        await EventStream(written, {}, held)(scope, receive, send)
    return apart(got)


def apart(texts: list[str]) -> list[str]:
    """The events; those of one message of the engine's are sent as one text."""
    return [f"{event}\n\n" for text in texts for event in text.split("\n\n")[:-1]]


def data(event: str) -> dict:
    assert event.startswith("data: ")
    assert event.endswith("\n\n")
    return json.loads(event.removeprefix("data: "))


def test_one_event_per_step_then_the_finish_the_usage_and_done():
    """The whole stream, each chunk held to the `openai` package's type."""
    source = Source(
        OutputDelta("He"), OutputDelta(""), OutputDelta("llo\n\n"), OutputDelta("!", FINISH)
    )
    got = asyncio.run(collect(source, include_usage=True))
    assert got.pop() == DONE
    chunks = [ChatCompletionChunk.model_validate(data(event), strict=True) for event in got]
    *texts, end, usage = chunks
    assert [chunk.choices[0].delta.content for chunk in texts] == ["He", "llo\n\n", "!"]
    assert texts[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].finish_reason is None for chunk in texts)
    assert end.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.total_tokens == 7
    assert data(got[-1])["usage"]["mars"]["tokens_per_forward"] == 2
    assert all(data(event)["usage"] is None for event in got[:-1])
    assert source.closed


def test_without_usage_no_chunk_speaks_of_it():
    """Clients that did not ask may not expect a chunk without choices."""
    got = asyncio.run(collect(Source(OutputDelta("x", FINISH)), include_usage=False))
    assert len(got) == 3
    assert all("usage" not in data(event) for event in got[:-1])


def test_a_late_refusal_is_the_last_event():
    """After the status line an error can only be an event; [DONE] would tell of success."""
    source = Source(OutputDelta("x"), ErrorInfo(503, "gone", code="engine_error"))
    got = asyncio.run(collect(source, include_usage=True))
    assert data(got[-1])["error"]["message"] == "gone"
    assert DONE not in got


def test_a_fault_is_an_event_without_its_details(caplog):
    """Guards a stack trace sent to the client, and a stream that just breaks off."""
    caplog.set_level(logging.CRITICAL)
    got = asyncio.run(
        collect(Source(OutputDelta("x"), RuntimeError("secret")), include_usage=False)
    )
    error = data(got[-1])["error"]
    assert error["code"] == "internal_error"
    assert "id" in error["message"]
    assert "secret" not in got[-1]


def test_a_stream_that_ends_without_a_finish_is_a_fault():
    """Guards a truncated answer that looks complete."""
    got = asyncio.run(collect(Source(OutputDelta("x")), include_usage=False))
    assert data(got[-1])["error"]["code"] == "internal_error"


def test_closing_the_events_closes_their_source():
    """A client that goes away must free its place in the engine."""
    source = Source(OutputDelta("a"), OutputDelta("b"), OutputDelta("c", FINISH))
    assert len(asyncio.run(collect(source, include_usage=False, take=2))) == 2
    assert source.closed


def test_choices_stream_side_by_side():
    """Each choice has an opening, texts and a finish of its own; usage adds them up."""
    call = GenerationRequest("id", ("a", "b"), VerifiedMode(), Sampling(), 5, 100, n=2)
    source = Source(
        *(OutputDelta(f"{choice}", choice=choice, forward=1, tokens=1) for choice in (2, 0, 3, 1)),
        *(OutputDelta("!", FINISH, choice=choice, forward=2, tokens=3) for choice in (1, 2, 3, 0)),
    )

    async def run() -> list[str]:
        rest = source.rest()
        chunks = Chunks(call, TextShape(), "m", 1, include_usage=True, forwards=True)
        return [event async for event in stream(chunks, await anext(rest), rest)]

    texts = asyncio.run(run())
    assert len(texts) == 8
    got = apart(texts)
    assert got.pop() == DONE
    # As the client does: it checks nothing, and before the end finish_reason is null.
    *chunks, usage = [Completion.construct(**data(event)) for event in got]
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice: f"{choice}!" for choice in range(4)}
    assert [c.choices[0].finish_reason for c in chunks].count("stop") == 4
    assert usage.usage is not None
    # Two prompts, each counted once; four answers.
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (6, 16)
    first = data(got[0])["choices"][0]
    assert first["mars"] == {"forward": 1, "tokens": 1}


def test_offsets_count_through_the_whole_text():
    """Of each choice for itself, and not anew in every chunk."""
    call = GenerationRequest("id", ("a",), VerifiedMode(), Sampling(), 5, 100, n=2, logprobs=0)
    chunks = Chunks(call, TextShape(), "m", 1, include_usage=False)
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for choice, texts in ((0, ["one", " two"]), (1, ["ten"]), (0, [" six"]), (1, [" "])):
        logprobs = tuple(TokenText(text, tuple(text.encode()), -1.0) for text in texts)
        for event in chunks.of(OutputDelta("".join(texts), choice=choice, logprobs=logprobs)):
            offsets[choice] += data(event)["choices"][0]["logprobs"]["text_offset"]
    assert offsets == {0: [0, 3, 7], 1: [0, 3]}
