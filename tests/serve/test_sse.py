"""Server-sent events: one per engine step, in OpenAI's chunks."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from serve.written import data, envelopes, events, texts
from starlette.requests import ClientDisconnect

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import VerifiedMode
from mars_ray.serve.ingress.app import EventStream, relay
from mars_ray.serve.ingress.middleware import RequestLog
from mars_ray.serve.openai.sse import DONE
from mars_ray.serve.protocol import (
    ErrorInfo,
    Finish,
    GenerationRequest,
    Message,
    OutputDelta,
    ReplyForm,
    TokenText,
    Turn,
)

REQUEST = GenerationRequest("id", ((Turn("user", "hi"),),), VerifiedMode(), Sampling(), None, 100)
WITH_USAGE = replace(REQUEST, reply=ReplyForm(has_usage=True))
FINISH = Finish("stop", prompt_tokens=3, completion_tokens=4, forwards=2)


class Source:
    """Gives messages, raises in the end if it is to fail, and remembers that it was closed."""

    def __init__(
        self,
        *messages: OutputDelta | ErrorInfo,
        request: GenerationRequest = REQUEST,
        fails: bool = False,
    ) -> None:
        self.request = request
        self._messages = list(envelopes(request, messages))
        self._fails = fails
        self.closed = False

    async def rest(self) -> AsyncGenerator[Message, None]:
        try:
            for message in self._messages:
                yield message
            if self._fails:
                raise RuntimeError("secret")
        finally:
            self.closed = True


async def collect(source: Source, take: int | None = None) -> list[str]:
    """The events that a client reads, which leaves after `take` of them."""
    rest, held, got = source.rest(), AsyncExitStack(), []
    await held.enter_async_context(aclosing(rest))
    log = RequestLog(None, "POST", "/v1/chat/completions")
    written = relay(source.request, log, await anext(rest), rest)

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
    return [f"{event}\n\n" for text in got for event in text.split("\n\n")[:-1]]


def test_one_event_per_step_then_the_finish_the_usage_and_done():
    """The whole stream, each chunk held to the `openai` package's type."""
    deltas = (OutputDelta("He"), OutputDelta(""), OutputDelta("llo\n\n"), OutputDelta("!", FINISH))
    source = Source(*deltas, request=WITH_USAGE)
    got = asyncio.run(collect(source))
    assert got.pop() == DONE
    made = data("".join(got))
    chunks = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in made]
    *said, end, usage = chunks
    assert [chunk.choices[0].delta.content for chunk in said] == ["He", "llo\n\n", "!"]
    assert said[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].finish_reason is None for chunk in said)
    assert end.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.total_tokens == 7
    assert made[-1]["usage"]["mars"]["tokens_per_forward"] == 2
    assert all(chunk["usage"] is None for chunk in made[:-1])
    assert source.closed


def test_without_usage_no_chunk_speaks_of_it():
    """Clients that did not ask may not expect a chunk without choices."""
    got = asyncio.run(collect(Source(OutputDelta("x", FINISH))))
    assert len(got) == 3
    assert all("usage" not in chunk for chunk in data("".join(got)))


def test_a_late_refusal_is_the_last_event():
    """After the status line an error can only be an event; [DONE] would tell of success."""
    source = Source(OutputDelta("x"), ErrorInfo(503, "gone", code="engine_error"))
    got = asyncio.run(collect(source))
    assert data(got[-1])[0]["error"]["message"] == "gone"
    assert DONE not in got


def test_an_error_of_a_response_has_the_number_behind_the_last_event():
    """Guards events whose numbers a client takes for a gap; the replica that counted is gone."""
    form = ReplyForm(route="response", response={"created_at": 1})
    request = replace(REQUEST, reply=form)
    source = Source(OutputDelta("a\n\nb"), ErrorInfo(503, "gone"), request=request)
    got = asyncio.run(collect(source))
    numbers = [json.loads(event.split("data: ")[1])["sequence_number"] for event in got]
    assert numbers == list(range(len(got)))
    assert got[-1].startswith("event: error\n")


def test_a_fault_is_an_event_without_its_details(caplog):
    """Guards a stack trace sent to the client, and a stream that just breaks off."""
    caplog.set_level(logging.CRITICAL)
    got = asyncio.run(collect(Source(OutputDelta("x"), fails=True)))
    error = data(got[-1])[0]["error"]
    assert error["code"] == "internal_error"
    assert "id" in error["message"]
    assert "secret" not in got[-1]


def test_a_stream_that_ends_without_a_finish_is_a_fault():
    """Guards a truncated answer that looks complete."""
    got = asyncio.run(collect(Source(OutputDelta("x"))))
    assert data(got[-1])[0]["error"]["code"] == "internal_error"


def test_closing_the_events_closes_their_source():
    """A client that goes away must free its place in the engine."""
    source = Source(OutputDelta("a"), OutputDelta("b"), OutputDelta("c", FINISH))
    assert len(asyncio.run(collect(source, take=2))) == 2
    assert source.closed


def test_choices_stream_side_by_side():
    """Each choice has an opening, texts and a finish of its own; usage adds them up."""
    request = texts(GenerationRequest("id", ("a", "b"), VerifiedMode(), Sampling(), 5, 100, n=2))
    request = replace(request, reply=replace(request.reply, has_usage=True))
    source = Source(
        *(OutputDelta(f"{choice}", choice=choice, forward=1, tokens=1) for choice in (2, 0, 3, 1)),
        *(OutputDelta("!", FINISH, choice=choice, forward=2, tokens=3) for choice in (1, 2, 3, 0)),
        request=request,
    )
    got = asyncio.run(collect(source))
    assert got.pop() == DONE
    made = data("".join(got))
    # As the client does: it checks nothing, and before the end finish_reason is null.
    *chunks, usage = [Completion.construct(**chunk) for chunk in made]
    said = dict.fromkeys(range(4), "")
    for chunk in chunks:
        said[chunk.choices[0].index] += chunk.choices[0].text
    assert said == {choice: f"{choice}!" for choice in range(4)}
    assert [c.choices[0].finish_reason for c in chunks].count("stop") == 4
    assert usage.usage is not None
    # Two prompts, each counted once; four answers.
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (6, 16)
    assert made[0]["choices"][0]["mars"] == {"forward": 1, "tokens": 1}


def test_offsets_count_through_the_whole_text():
    """Of each choice for itself, and not anew in every chunk."""
    request = GenerationRequest("id", ("a",), VerifiedMode(), Sampling(), 5, 100, n=2, logprobs=0)
    deltas = [
        OutputDelta(
            "".join(said),
            choice=choice,
            logprobs=tuple(TokenText(text, tuple(text.encode()), -1.0) for text in said),
        )
        for choice, said in ((0, ["one", " two"]), (1, ["ten"]), (0, [" six"]), (1, [" "]))
    ]
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for event in events(texts(request), *deltas):
        (choice,) = event["choices"]
        offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert offsets == {0: [0, 3, 7], 1: [0, 3]}
