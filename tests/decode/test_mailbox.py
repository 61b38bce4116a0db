"""Events on their way from the engine's thread: none is lost or late, few wake-ups."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable

import pytest
from decode.models import CARD, pattern, request, trained_model

from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import ExactMode
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.engine import Engine
from mars_ray.decode.engine_thread import Deliver, RequestOutputCollector
from mars_ray.decode.request import Completion, TokenEvent, TokenLogprobs, as_one


def event(number: int, is_last: bool = False) -> TokenEvent:
    completion = Completion("a", (number,), "stop", number, (number,)) if is_last else None
    return TokenEvent("a", (number,), number, completion)


def stream_of(
    requests: int, interval_s: float, submit: Callable[[Deliver], None]
) -> AsyncGenerator[list[TokenEvent], None]:
    """The events of so many requests, which `submit` is to deliver."""
    asked = [request(str(n), (1,), ExactMode()) for n in range(requests)]
    return RequestOutputCollector().stream(asked, interval_s, submit, lambda *_: None, ())


def test_nothing_is_lost_between_two_threads():
    """Guards an event that comes just while its reader decides to wait."""
    count = 20_000

    async def read() -> list[int]:
        def write(deliver: Deliver) -> None:
            for n in range(1, count + 1):
                deliver(event(n, n == count))

        def submit(deliver: Deliver) -> None:
            threading.Thread(target=write, args=(deliver,)).start()

        async with asyncio.timeout(20):
            return [got.forward async for some in stream_of(1, 0.0, submit) for got in some]

    assert asyncio.run(read()) == list(range(1, count + 1))


@pytest.mark.parametrize(
    "urgent",
    [event(2, is_last=True), TokenEvent("a", (), 0, failure=RuntimeError("the end")), event(1)],
    ids=["completion", "failure", "first"],
)
def test_the_last_event_ends_the_wait(urgent):
    """Guards an answer whose end comes an interval late, and one whose beginning does because that
    of another request came just before."""

    async def wait() -> None:
        put: list[Deliver] = []
        steps = stream_of(2, 60.0, put.append)
        first = asyncio.ensure_future(anext(steps))
        await asyncio.sleep(0)
        (deliver,) = put
        deliver(event(1))
        assert await asyncio.wait_for(first, 10) == [event(1)]
        rest = asyncio.ensure_future(anext(steps))
        deliver(event(2))
        await asyncio.sleep(0.05)
        assert not rest.done()
        deliver(urgent)
        assert await asyncio.wait_for(rest, 10) == [event(2), urgent]
        if not urgent.failure:
            # What was taken ends no other wait.
            later = asyncio.ensure_future(anext(steps))
            deliver(event(3))
            await asyncio.sleep(0.05)
            assert not later.done()
            later.cancel()

    asyncio.run(wait())


def test_a_stream_in_intervals_has_the_same_events():
    """The first at once, the others together, the end when it comes; all together if all are there
    before the first is read."""
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
    assert len(some) <= 2


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
