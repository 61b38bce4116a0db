"""Several answers to one request: what ends one of them, and what ends them all."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from serve.written import choices, text_of_choice, texts

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import TokenEvent
from mars_ray.serve.protocol import Envelope, ErrorInfo, GenerationRequest, Message
from mars_ray.serve.replica.llm_server import LLMServer
from mars_ray.serve.replica.stats import AnswerStats

CALL = GenerationRequest(
    "several", ("one two three",), ExactMode(), Sampling(temperature=1.5), 100, 100, n=3
)
STEPS = texts(CALL)


class Served:
    """A server, its engine, and what an observer was told of its answers."""

    def __init__(self, server: LLMServer, engine: Engine) -> None:
        self.server = server
        self.engine = engine
        self.told: list[AnswerStats] = []

    @property
    def endings(self) -> list[str]:
        return sorted(seen.ending for seen in self.told)

    def slow_down(self) -> None:
        """So that the engine is not done before a busy loop hears of its first steps."""
        step = self.engine.step

        def slowly(*args: Callable[[], None]) -> list[TokenEvent]:
            time.sleep(0.02)
            return step(*args)

        self.engine.step = slowly

    @asynccontextmanager
    async def begun(self, steps: int) -> AsyncIterator[AsyncIterator[Message]]:
        """What follows the first steps of the request, of an engine that is slow."""
        self.slow_down()
        async with aclosing(self.server.generate(STEPS)) as messages:
            for _ in range(steps):
                await anext(messages)
            yield messages

    async def idle(self) -> None:
        """Once nothing is left in the engine; within seconds, or the test fails."""
        async with asyncio.timeout(10):
            while self.engine.has_work:
                await asyncio.sleep(0.01)
        assert self.server.open_answers == 0


@pytest.fixture
def served(job) -> Iterator[Served]:
    engine, tokenizer = load_engine(job.checkpoint, job.engine)
    served = Served(LLMServer(AsyncEngine(engine), tokenizer, job), engine)
    served.server._counters._observe = served.told.append
    served.server.start()
    yield served
    served.server.stop()
    engine.check_integrity()


def heard(served: Served, call: GenerationRequest) -> list[Message]:
    async def run() -> list[Message]:
        messages = [message async for message in served.server.generate(call)]
        await served.idle()
        return messages

    return asyncio.run(run())


def test_closing_ends_all_answers(served):
    """Guards two of three sequences that run on for nobody, and answers that no one counts."""

    async def leave() -> None:
        async with served.begun(6):
            assert served.engine.running == 3
        await served.idle()

    asyncio.run(leave())
    assert served.endings == ["abort"] * 3
    assert all(1 <= seen.completion_tokens < 100 for seen in served.told)
    assert served.server._counters.finished == 3


def test_each_answer_begins_at_once_and_ends_at_once(served, job):
    """Guards an answer whose first token waits for the pace of another one."""
    served.server._job = job.model_copy(update={"stream_interval_s": 60.0})
    begin = time.monotonic()
    messages = heard(served, CALL)
    assert time.monotonic() - begin < 30
    said = choices(messages)
    for index in range(3):
        own = [choice for choice in said if choice["index"] == index]
        assert len(own) >= 2
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
    assert isinstance(messages[-1], Envelope)
    assert messages[-1].used.completion_tokens == 300


def test_an_answer_that_meets_its_stop_string_leaves_the_engine_and_the_others_go_on(served):
    """Guards a sequence that is decoded to its end because its neighbours are not over."""
    alone = heard(served, STEPS)
    said = [text_of_choice(alone, index) for index in range(3)]
    stop = next(
        text
        for place in range(10, 60)
        if (text := said[0][place : place + 3]) and text not in said[1] + said[2]
    )
    served.told.clear()
    served.slow_down()

    async def run() -> tuple[int, list[Message]]:
        heard, running = [], 3
        async with aclosing(served.server.generate(replace(STEPS, stop=(stop,)))) as messages:
            async for message in messages:
                heard.append(message)
                ended = [each["index"] for each in choices(heard) if each["finish_reason"]]
                if ended == [0]:
                    running = min(running, served.engine.running)
        await served.idle()
        return running, heard

    running, messages = asyncio.run(run())
    assert running == 2
    shorter = said[0][: said[0].index(stop)]
    assert [text_of_choice(messages, index) for index in range(3)] == [shorter, *said[1:]]
    assert served.endings == ["length", "length", "stop"]
    assert served.server._counters.finished == 6


def test_one_answer_that_fails_ends_them_all(served, monkeypatch, caplog):
    """A reply cannot tell of half a request; the others are aborted, and nothing is left."""
    absorb = served.engine._absorb

    def fails_for_one(sequence, *args):
        if sequence.request.id == "several-1" and sequence.forwards == 5:
            raise RuntimeError("secret")
        return absorb(sequence, *args)

    monkeypatch.setattr(served.engine, "_absorb", fails_for_one)
    messages = heard(served, CALL)
    assert isinstance(messages[-1], ErrorInfo)
    assert (messages[-1].status, messages[-1].code) == (500, "internal_error")
    assert "secret" not in messages[-1].message
    assert served.endings == ["abort", "abort", "error"]
    assert served.server._counters.finished == 3
    served.server.check_health()


def test_one_prompt_that_is_refused_refuses_the_request(served):
    """Before a token of the others is told; what was refused counts as nobody's answer."""
    call = replace(CALL, prompts=("one two", "one " * 500), n=1)
    (refused,) = heard(served, call)
    assert isinstance(refused, ErrorInfo)
    assert (refused.status, refused.code) == (400, "context_length_exceeded")
    assert served.endings == ["abort", "refused"]
    assert served.server._counters.finished == 1


def test_an_answer_that_has_met_its_stop_string_cannot_fail_any_more(served, job, monkeypatch):
    """Guards the others: the engine goes on with it for a while, as steps travel together."""
    alone = heard(served, STEPS)
    said = [text_of_choice(alone, index) for index in range(3)]
    stop = next(
        text
        for place in range(10, 60)
        if (text := said[0][place : place + 3]) and text not in said[1] + said[2]
    )
    served.told.clear()
    served.server._job = job.model_copy(update={"stream_interval_s": 60.0})
    absorb = served.engine._absorb

    def fails_for_one(sequence, *args):
        if sequence.request.id == "several-0" and sequence.forwards == 90:
            raise RuntimeError("behind the stop string")
        return absorb(sequence, *args)

    monkeypatch.setattr(served.engine, "_absorb", fails_for_one)
    messages = heard(served, replace(CALL, stop=(stop,)))
    assert all(isinstance(message, Envelope) for message in messages)
    assert served.endings == ["length", "length", "stop"]


def test_what_comes_behind_a_failure_is_not_told(served):
    """Guards a status of 200 with a piece of an answer, where the request is refused."""

    async def run() -> list[Message]:
        call = replace(CALL, prompts=("one two", "one " * 500), n=1)
        async with aclosing(served.server.generate(call)) as messages:
            begun = asyncio.ensure_future(anext(messages))
            await asyncio.sleep(0)
            time.sleep(0.2)  # the loop is busy, while the engine takes steps
            return [await begun, *[message async for message in messages]]

    (refused,) = asyncio.run(run())
    assert isinstance(refused, ErrorInfo)
    assert refused.code == "context_length_exceeded"


def test_a_prompt_that_is_refused_counts_as_no_answer_at_all(served):
    """Guards answers of no tokens, by which the policy would take requests for short ones."""
    (refused,) = heard(served, replace(CALL, prompts=("one " * 500,)))
    assert isinstance(refused, ErrorInfo)
    assert served.endings == ["refused"] * 3
    assert served.server._counters.finished == 0


def test_a_deadline_ends_all_answers(served):
    """With one error for the request."""
    messages = heard(served, replace(CALL, timeout_s=1e-6))
    assert isinstance(messages[-1], ErrorInfo)
    assert (messages[-1].status, messages[-1].code) == (408, "deadline_exceeded")
    assert "deadline" in served.endings


def test_an_engine_that_ends_ends_all_answers(served):
    """Each of them counts as an error of the service."""

    async def run() -> Message:
        async with served.begun(3) as messages:
            await asyncio.to_thread(served.server.stop)
            return [message async for message in messages][-1]

    error = asyncio.run(run())
    assert isinstance(error, ErrorInfo)
    assert (error.status, error.code) == (503, "engine_error")
    assert "error" in served.endings
    assert len(served.endings) == 3
    assert served.server.open_answers == 0
