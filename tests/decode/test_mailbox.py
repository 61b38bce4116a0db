"""Events on their way from the engine's thread: none is lost or late, few wake-ups."""

import asyncio
import threading
import time

import pytest
from decode.models import CARD, pattern, request, trained_model

from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import ExactMode
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.engine import Engine
from mars_ray.decode.engine_thread import RequestOutputCollector
from mars_ray.decode.request import Completion, TokenEvent, TokenLogprobs, as_one


def event(number: int, is_last: bool = False) -> TokenEvent:
    completion = Completion("a", (number,), "stop", number, (number,)) if is_last else None
    return TokenEvent("a", (number,), number, completion)


def test_nothing_is_lost_between_two_threads():
    """Guards an event that comes just while its reader decides to wait."""
    count = 20_000

    async def read() -> list[int]:
        mailbox = RequestOutputCollector()
        writer = threading.Thread(
            target=lambda: [mailbox.put(event(n, n == count)) for n in range(1, count + 1)]
        )
        writer.start()
        numbers: list[int] = []
        while not numbers or numbers[-1] < count:
            numbers += [got.forward for got in await asyncio.wait_for(mailbox.take(), 20)]
        writer.join()
        return numbers

    assert asyncio.run(read()) == list(range(1, count + 1))


@pytest.mark.parametrize(
    "urgent",
    [event(2, is_last=True), TokenEvent("a", (), 0, failure=RuntimeError("the end")), event(1)],
    ids=["completion", "failure", "first"],
)
def test_the_last_event_ends_the_wait(urgent):
    """Guards an answer whose end comes an interval late, and one whose beginning does because that
    of another request came just before."""

    async def wait() -> float:
        mailbox = RequestOutputCollector()
        mailbox.put(event(1))
        assert len(await mailbox.take()) == 1
        mailbox.put(event(2))
        begin = time.monotonic()
        await mailbox.pause(0.05)
        assert time.monotonic() - begin > 0.04
        mailbox.put(urgent)
        await mailbox.pause(60)
        assert await mailbox.take() == [event(2), urgent]
        # What was taken ends no other wait.
        await mailbox.pause(0.05)
        return time.monotonic() - begin

    assert 0.08 < asyncio.run(wait()) < 10


def test_a_stream_in_intervals_has_the_same_events():
    """The first at once, the others together, the end when it comes."""
    thread = AsyncEngine(
        Engine(trained_model(steps=5), CARD, EngineConfig(max_batch=2, max_context=64))
    )
    thread.start()
    item = request("a", pattern(0, 2, 5), ExactMode(), max_new_tokens=30, stop=-1)

    async def read(interval_s: float) -> list[list[TokenEvent]]:
        return [events async for events in thread.stream(item, interval_s=interval_s)]

    each, some = asyncio.run(read(0.0)), asyncio.run(read(60.0))
    thread.stop()
    flat = [[e.tokens for events in got for e in events] for got in (each, some)]
    assert flat[0] == flat[1]
    assert len(flat[0]) == 30
    assert len(some) == 2


def test_several_events_as_one_keep_everything():
    """Guards log-probabilities that are lost on the way."""
    logprobs = [TokenLogprobs(-float(n), ()) for n in range(3)]
    events = [
        TokenEvent("a", (n,), n, logprobs=(logprobs[n],), confidences=(n / 10,), disagreed=n)
        for n in range(3)
    ]
    one = as_one(events)
    assert (one.tokens, one.forward, one.disagreed) == ((0, 1, 2), 2, 2)
    assert (one.logprobs, one.confidences) == (tuple(logprobs), (0.0, 0.1, 0.2))
