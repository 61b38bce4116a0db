"""How an answer's steps are put together on their way; the answer stays what it was."""

import asyncio
from dataclasses import replace

import pytest

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.serve.protocol import (
    Finish,
    GenerationRequest,
    Message,
    OutputDelta,
    TokenText,
    ToolCallDelta,
    joined,
)

CALL = GenerationRequest("delivery", ("one two three",), ExactMode(), Sampling(), 40, 100)


def heard(text_engine, call: GenerationRequest) -> list[Message]:
    async def run() -> list[Message]:
        return [message async for message in text_engine.generate(call)]

    return asyncio.run(run())


@pytest.mark.parametrize("logprobs", [None, 2])
def test_the_answer_is_the_same_however_it_is_delivered(text_engine, logprobs):
    """A piece a step, one an interval, or one in all."""
    call = replace(CALL, logprobs=logprobs)
    steps, paced, whole = (
        heard(text_engine, replace(call, delivery=delivery))
        for delivery in ("steps", "paced", "whole")
    )
    assert [piece.forward for piece in steps] == list(range(1, 41))
    assert 1 < len(paced) < len(steps)
    assert len(whole) == 1
    for pieces in (paced, whole):
        assert "".join(p.text for p in pieces) == "".join(p.text for p in steps)
        assert sum(p.tokens for p in pieces) == 40
        assert pieces[-1].finish == steps[-1].finish
        told = [entry for piece in pieces for entry in piece.logprobs]
        assert told == [entry for piece in steps for entry in piece.logprobs]


def test_a_stop_string_ends_in_the_middle_of_an_interval(text_engine):
    """Guards tokens and forwards that are counted though they came behind it."""
    text = "".join(p.text for p in heard(text_engine, replace(CALL, delivery="steps")))
    call = replace(CALL, stop=(text[len(text) // 2 :][:3],))
    steps, paced, whole = (
        heard(text_engine, replace(call, delivery=delivery))
        for delivery in ("steps", "paced", "whole")
    )
    assert steps[-1].finish.completion_tokens < 40
    assert paced[-1].finish == whole[-1].finish == steps[-1].finish
    assert "".join(p.text for p in paced) == whole[0].text == "".join(p.text for p in steps)


def test_everything_a_piece_has_is_kept():
    """Guards calls that are lost where pieces are joined, and a chunk for every step of one."""
    logprobs = tuple(TokenText(text, (97,), -1.0) for text in "ab")
    begun, more = ToolCallDelta(0, id="1", name="f"), ToolCallDelta(0, "{")
    finish = Finish("stop", 1, 2, 2)
    first = OutputDelta("a", forward=1, tokens=1, logprobs=logprobs[:1], calls=(begun, more))
    other = ToolCallDelta(1, id="2", name="f")
    second = OutputDelta("b", finish, 0, 2, 1, logprobs[1:], (ToolCallDelta(0, "}"), other))
    calls = (begun, ToolCallDelta(0, "{}"), other)
    assert joined(first, second) == OutputDelta("ab", finish, 0, 2, 2, logprobs, calls)
