"""The engine's thread, from asyncio."""

import asyncio
import threading

import pytest
from decode import reference
from decode.models import CARD, complete, pattern, request

from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import ExactMode, VerifiedMode
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.engine import Engine
from mars_ray.decode.engine_thread import RequestOutputCollector
from mars_ray.errors import EngineError, RequestError


@pytest.fixture(params=[False, True], ids=["at once", "beside the next forward"])
def engine(model, request, monkeypatch):
    """Also one that leaves the processor free, as those on a GPU do."""
    monkeypatch.setattr(Engine, "overlaps", request.param)
    return Engine(model, CARD, EngineConfig(max_batch=4, max_context=200))


@pytest.fixture
def thread(engine):
    thread = AsyncEngine(engine)
    thread.start()
    yield thread
    thread.stop()
    assert not engine.has_work
    engine.check_integrity()


def test_many_streams_at_once_give_what_each_gives_alone(model, thread):
    """Twelve clients on four slots; events of a request arrive in order and add up."""
    items = [request(str(j), pattern(j, 1 + j % 3, 4 + j), VerifiedMode()) for j in range(12)]

    async def collect(item):
        events = [event async for some in thread.stream(item) for event in some]
        assert [event.forward for event in events] == list(range(1, len(events) + 1))
        tokens = tuple(token for event in events for token in event.tokens)
        assert tokens == events[-1].completion.tokens
        return events[-1].completion

    async def all_of_them():
        return await asyncio.gather(*(collect(item) for item in items))

    done = asyncio.run(all_of_them())
    assert done == [reference.generate(model, CARD, item) for item in items]
    assert thread.open_requests == 0


def test_where_the_device_leaves_time_events_go_out_beside_the_next_forward(
    engine, thread, monkeypatch
):
    """And everywhere else at once; the last ones when there is no next forward."""
    order = []
    step, put = Engine.step, RequestOutputCollector.put

    def watched(self, meanwhile):
        return step(self, lambda: (order.append("asked"), meanwhile()))

    def noted(self, event):
        order.append(event.forward)
        put(self, event)

    monkeypatch.setattr(Engine, "step", watched)
    monkeypatch.setattr(RequestOutputCollector, "put", noted)
    item = request("a", [1, 2], ExactMode(), max_new_tokens=3, stop=-1)
    asyncio.run(complete(thread, item))

    if engine.overlaps:
        assert order == ["asked", "asked", 1, "asked", 2, 3]
    else:
        assert order == ["asked", 1, "asked", 2, "asked", 3]


def test_an_answer_that_is_over_is_told_though_the_only_other_one_is_cancelled(
    engine, thread, monkeypatch
):
    """Guards an event kept for a forward that never comes."""
    over, cancelled = threading.Event(), threading.Event()
    step = Engine.step

    def slow(self, meanwhile):
        events = step(self, meanwhile)
        if any(event.completion for event in events):
            over.set()
            cancelled.wait(10)
        return events

    monkeypatch.setattr(Engine, "step", slow)

    async def both():
        long = thread.stream(request("a", [1, 2], ExactMode(), max_new_tokens=190, stop=-1))
        await anext(long)
        item = request("b", [1], ExactMode(), max_new_tokens=2, stop=-1)
        short = asyncio.create_task(complete(thread, item))
        assert await asyncio.to_thread(over.wait, 10)
        await long.aclose()
        cancelled.set()
        return await asyncio.wait_for(short, 10)

    assert len(asyncio.run(both()).tokens) == 2


def test_closing_a_stream_cancels_its_request(engine, thread):
    """Guards requests that run on after their client is gone."""

    async def leave_early():
        stream = thread.stream(request("a", [1, 2], ExactMode(), max_new_tokens=190, stop=-1))
        await anext(stream)
        await stream.aclose()
        # The queue is in order: this one's end comes after the cancellation.
        return await complete(thread, request("b", [1, 2], ExactMode(), max_new_tokens=2))

    assert len(asyncio.run(leave_early()).tokens) == 2
    assert engine.running == 0


def test_a_refused_request_disturbs_nobody(thread):
    """The refusal reaches its client as the exception it was."""

    async def both():
        good = asyncio.create_task(complete(thread, request("a", [1], ExactMode())))
        with pytest.raises(RequestError, match="empty"):
            await complete(thread, request("b", [], ExactMode()))
        return await good

    assert asyncio.run(both()).finish_reason in ("stop", "length")


def test_a_second_request_with_the_same_id_is_refused_and_the_first_goes_on(thread):
    """Guards a refusal that cancels the request it was compared with."""

    async def twice():
        first = thread.stream(request("a", [1, 2], ExactMode(), max_new_tokens=100, stop=-1))
        await anext(first)
        with pytest.raises(RequestError, match="in use"):
            await complete(thread, request("a", [1, 2], ExactMode()))
        return [event async for some in first for event in some][-1].completion

    assert len(asyncio.run(twice()).tokens) == 100


def test_a_request_that_breaks_the_engine_is_the_only_one_to_fail(engine, thread, monkeypatch):
    """Guards a thread that ends in silence on an exception nobody foresaw."""
    submit = engine.submit

    def break_on_b(item):
        if item.id == "b":
            raise ValueError("broken")
        submit(item)

    monkeypatch.setattr(engine, "submit", break_on_b)

    async def both():
        good = asyncio.create_task(complete(thread, request("a", [1], ExactMode())))
        with pytest.raises(EngineError, match="ValueError"):
            await complete(thread, request("b", [1], ExactMode()))
        return await good

    assert asyncio.run(both()).tokens


def test_when_the_thread_itself_breaks_nobody_waits(model, monkeypatch):
    """An integrity check that fails ends the thread: later requests get an error at once."""
    engine = Engine(model, CARD, EngineConfig(max_batch=1, max_context=64))
    thread = AsyncEngine(engine)
    monkeypatch.setattr(engine, "check_integrity", lambda: 1 / 0)
    thread.start()
    with pytest.raises(EngineError, match="shut down"):
        asyncio.run(complete(thread, request("a", [1], ExactMode())))
    asyncio.run(asyncio.wait_for(thread.ended(), 10))
    thread.stop()
    with pytest.raises(EngineError, match="not running"):
        thread.check_health()


def test_every_page_is_checked_once_a_minute_and_their_number_always(engine, monkeypatch):
    """Guards requests that follow one another from tens of milliseconds each, and a lost page."""
    checks = []
    monkeypatch.setattr(engine, "check_integrity", lambda: checks.append(engine.running))
    thread = AsyncEngine(engine)
    thread.start()

    async def answered(*names: str) -> None:
        for name in names:
            await complete(thread, request(name, [1, 2], ExactMode(), max_new_tokens=2))

    async def checked(times: int) -> None:
        while len(checks) < times:
            await asyncio.sleep(0.01)

    async def lose_a_page() -> None:
        await answered("a")
        await checked(1)
        await answered("b", "c")
        assert checks == [0]
        thread._next_check_s = 0.0
        await answered("d")
        await checked(2)
        await answered("e", "f")
        assert checks == [0, 0]
        await thread.ask(lambda engine: engine.pool.take(1))
        await thread.ended()
        with pytest.raises(EngineError, match="shut down"):
            await answered("g")

    asyncio.run(asyncio.wait_for(lose_a_page(), 20))


def test_a_question_is_answered_between_steps(thread):
    """With work and without; one that fails tells only who asked."""

    async def ask():
        assert await thread.ask(lambda engine: engine.running) == 0
        stream = thread.stream(request("a", [1, 2], ExactMode(), max_new_tokens=100, stop=-1))
        await anext(stream)
        assert await thread.ask(lambda engine: engine.running) == 1
        with pytest.raises(ZeroDivisionError):
            await thread.ask(lambda engine: engine.running // 0)
        await stream.aclose()
        assert await thread.ask(lambda engine: engine.running) == 0

    asyncio.run(ask())
    thread.check_health()


def test_a_thread_that_does_not_take_up_commands_is_not_healthy(thread):
    """Guards an engine that hangs in a change of adapters: without a request in it, nobody would
    ever miss it, and every later one would wait."""

    async def hang() -> None:
        begun, over = threading.Event(), threading.Event()
        hung = asyncio.create_task(thread.ask(lambda _: begun.set() or over.wait(20)))
        await asyncio.to_thread(begun.wait, 20)
        await asyncio.sleep(0.2)
        thread.check_health(0.1)  # nobody waits for it but who asked
        asked = asyncio.create_task(thread.ask(lambda engine: engine.running))
        await asyncio.sleep(0)
        thread.check_health(0.1)
        await asyncio.sleep(0.2)
        with pytest.raises(EngineError, match="has not taken up a command for"):
            thread.check_health(0.1)
        over.set()
        await hung
        assert await asked == 0
        thread.check_health(0.1)

    asyncio.run(hang())


def test_after_stop_there_are_errors_not_silence(engine):
    """Both for a stream that is open and for one that comes later."""
    thread = AsyncEngine(engine)
    thread.start()

    async def stop_in_the_middle():
        stream = thread.stream(request("a", [1, 2], ExactMode(), max_new_tokens=190, stop=-1))
        await anext(stream)
        await asyncio.to_thread(thread.stop)
        with pytest.raises(EngineError, match="shut down"):
            async for _ in stream:
                pass
        with pytest.raises(EngineError, match="shut down"):
            await complete(thread, request("b", [1], ExactMode()))

    asyncio.run(stop_in_the_middle())
    with pytest.raises(EngineError, match="not running"):
        thread.check_health()
