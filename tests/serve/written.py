"""What replicas send, written from deltas, and what a client reads of it."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from mars_ray.serve.protocol import (
    Envelope,
    ErrorInfo,
    GenerationRequest,
    Message,
    OutputDelta,
    ReplyForm,
    Used,
)
from mars_ray.serve.replica.output_processor import reply_writer

DONE = "data: [DONE]\n\n"


def texts(request: GenerationRequest) -> GenerationRequest:
    """The request as a completion, with an event of each step."""
    form = ReplyForm(route="completion", by_step=True)
    return replace(request, reply=form)


def envelopes(
    request: GenerationRequest, messages: Iterable[OutputDelta | ErrorInfo]
) -> Iterator[Message]:
    """What a replica sends whose answers have these deltas."""
    writer = reply_writer(request)
    used: dict[int, Used] = {}
    unfinished = request.choices
    for message in messages:
        if isinstance(message, ErrorInfo):
            yield message
            continue
        text, finish = writer.write(message), message.finish
        before = used.get(message.choice, Used())
        is_first = message.choice % request.n == 0
        prompt_tokens = message.prompt_tokens * is_first
        tokens = before.completion_tokens + message.tokens
        own = Used(prompt_tokens, 0, tokens, message.forward)
        if finish:
            counts = (finish.completion_tokens, finish.forwards, finish.disagreed)
            own = Used(finish.prompt_tokens * is_first, finish.cached_tokens * is_first, *counts)
            unfinished -= 1
        used[message.choice] = own
        every = used.values()
        so_far = Used(
            sum(one.prompt_tokens for one in every),
            sum(one.cached_tokens for one in every),
            sum(one.completion_tokens for one in every),
            sum(one.forwards for one in every),
            sum(one.disagreed for one in every),
        )
        if finish and not unfinished:
            yield Envelope(text + writer.end(), so_far, finish.reason, finish.mode)
        elif text:
            yield Envelope(text, so_far)


def events(request: GenerationRequest, *deltas: OutputDelta) -> list[dict[str, Any]]:
    """The events of a stream of these deltas."""
    writer = reply_writer(request)
    return data("".join(map(writer.write, deltas)))


def whole(request: GenerationRequest, *deltas: OutputDelta) -> dict[str, Any]:
    """The reply of these deltas."""
    writer = reply_writer(replace(request, reply=replace(request.reply, is_streamed=False)))
    assert "".join(map(writer.write, deltas)) == ""
    return json.loads(writer.end())


def data(text: str) -> list[dict[str, Any]]:
    """The events of a text, without the mark at its end."""
    apart = text.removesuffix(DONE).split("\n\n")
    assert apart.pop() == ""
    return [json.loads(event.removeprefix("data: ")) for event in apart]


def choices(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The choices of all events of envelopes."""
    said = "".join(message.text for message in messages if isinstance(message, Envelope))
    return [choice for event in data(said) for choice in event["choices"]]


def text_of_choice(messages: Iterable[Message], index: int = 0) -> str:
    """What a choice of a completion says."""
    return "".join(choice["text"] for choice in choices(messages) if choice["index"] == index)
