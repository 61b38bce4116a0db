"""Pieces put together on their way; the answer stays what it was."""

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.serve.messages import Finish, Message, Piece, Refusal, TokenText, ToolCall
from mars_ray.serve.pace import paced

FINISH = Finish("stop", prompt_tokens=3, completion_tokens=4, forwards=2)


async def source(*messages: Message | float) -> AsyncGenerator[Message, None]:
    """Gives messages, and waits so many seconds at a number."""
    for message in messages:
        if isinstance(message, float):
            await asyncio.sleep(message)
        else:
            yield message


def collect(messages: AsyncGenerator[Message, None], interval_s: float | None) -> list[Message]:
    async def run() -> list[Message]:
        return [message async for message in paced(messages, interval_s)]

    return asyncio.run(run())


def test_the_first_goes_at_once_and_the_end_too():
    """Guards a first token that waits for the interval, and an end that does."""
    begin = time.monotonic()
    got = collect(source(Piece("a"), 0.05, Piece("b"), Piece("c"), 0.05, Piece("d", FINISH)), 60)
    assert time.monotonic() - begin < 5
    assert got == [Piece("a"), Piece("bcd", FINISH)]


def test_steps_longer_than_the_interval_are_not_put_together():
    """A large model's chunks are its steps."""
    got = collect(source(Piece("a"), 0.05, Piece("b"), 0.05, Piece("c", FINISH)), 0.001)
    assert got == [Piece("a"), Piece("b"), Piece("c", FINISH)]


def test_a_whole_answer_is_the_first_piece_and_the_rest():
    """Whoever does not stream gets no message for each step."""
    pieces = [Piece("x", forward=n, tokens=2) for n in range(1, 50)]
    first, rest = collect(source(*pieces[:1], 0.02, *pieces[1:], Piece("!", FINISH, 0, 50)), None)
    assert (first, rest.text, rest.tokens) == (pieces[0], "x" * 48 + "!", 96)
    assert (rest.forward, rest.finish) == (50, FINISH)


def test_everything_a_piece_has_is_kept():
    """Guards log-probabilities and calls that are lost where pieces are joined."""
    logprobs = tuple(TokenText(text, (97,), -1.0) for text in "abc")
    call = ToolCall("1", "f", "{}")
    pieces = [Piece("a", logprobs=logprobs[:1]), Piece("b", logprobs=logprobs[1:], calls=(call,))]
    _, joined = collect(source(Piece("-"), 0.01, *pieces, Piece("", FINISH)), None)
    assert (joined.logprobs, joined.calls) == (logprobs, (call,))


def test_a_refusal_is_last_and_keeps_what_came_before():
    """A client is told what was said before the fault."""
    refusal = Refusal(503, "gone")
    got = collect(source(Piece("a"), 0.01, Piece("b"), refusal), None)
    assert got == [Piece("a"), Piece("b"), refusal]
    assert collect(source(refusal), 0.02) == [refusal]


@given(
    choices=st.lists(st.integers(0, 3), max_size=40), interval=st.sampled_from([0.0, 1e-4, None])
)
def test_each_choice_keeps_its_order(choices, interval):
    """Whatever the pace, the texts of a choice join to the same answer."""
    sent = [Piece(f"{number},", choice=choice) for number, choice in enumerate(choices)]
    got = collect(source(*sent), interval)
    for choice in range(4):
        texts = ["".join(p.text for p in some if p.choice == choice) for some in (sent, got)]
        assert texts[0] == texts[1]


def test_closing_closes_the_source_and_faults_pass():
    """A client that goes away must free its place in the engine."""
    closed = []

    async def endless() -> AsyncGenerator[Message, None]:
        try:
            while True:
                yield Piece("x")
                await asyncio.sleep(0.001)
        finally:
            closed.append(True)

    async def leave() -> None:
        messages = paced(endless(), 0.001)
        await anext(messages)
        await messages.aclose()

    asyncio.run(leave())
    assert closed == [True]

    async def broken() -> AsyncGenerator[Message, None]:
        yield Piece("a")
        raise RuntimeError("fault")

    with pytest.raises(RuntimeError, match="fault"):
        collect(broken(), 0.02)
