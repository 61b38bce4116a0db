"""A request on which the engine fails: it is found, and it is the only one that fails."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from decode import reference
from decode.cases import untrained
from decode.models import CARD, VOCABULARY, complete, pattern, request

from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import ConfidenceMode, ExactMode, Mode, VerifiedMode
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.attention.dense import DenseBackend
from mars_ray.decode.engine import Engine
from mars_ray.decode.fused_model import FusedModel
from mars_ray.errors import EngineError, PoisonError, RequestError

POISON = 21  # a token that no pattern has
MODES: list[Mode] = [ExactMode(), VerifiedMode(), ConfidenceMode(threshold=0.6)]


class BrittleRunner(FusedModel):
    """Fails on the poison when it has already written into the cache, as a kernel might."""

    def hidden_states(self, ids_N, *others):
        out_NH = super().hidden_states(ids_N, *others)
        if torch.any(ids_N == POISON):
            raise RuntimeError("cannot forward")
        return out_NH


class Brittle(Engine):
    """Fails on the poison in the part of a step that it is told."""

    def __init__(self, model, part: str, **config) -> None:
        super().__init__(model, CARD, EngineConfig(max_batch=4, max_context=200, **config))
        self.part = part
        if part == "forward":
            self._backend = DenseBackend(BrittleRunner(model, 220), self._backend.cache)

    def _prepare(self) -> None:
        running = self._scheduler.running_sequences()
        bad = any(POISON in s.request.prompt and s.forwards >= 3 for s in running)
        if self.part == "always" or (self.part == "prepare" and bad):
            raise RuntimeError("cannot prepare")
        super()._prepare()

    def _absorb(self, sequence, *others):
        if self.part == "absorb" and POISON in sequence.request.prompt and sequence.forwards >= 3:
            raise RuntimeError("cannot absorb")
        return super()._absorb(sequence, *others)


@pytest.fixture
def thread_of(caplog):
    """Starts threads, and sees to it that nothing is left in their engines."""
    caplog.set_level(logging.CRITICAL)
    threads = []

    def start(engine: Engine) -> AsyncEngine:
        threads.append((engine, AsyncEngine(engine)))
        threads[-1][1].start()
        return threads[-1][1]

    yield start
    for engine, thread in threads:
        thread.stop()
        assert not engine.has_work
        engine.check_integrity()
        assert engine.pool.in_use == 0


@pytest.mark.parametrize("part", ["prepare", "forward", "absorb"])
@pytest.mark.parametrize("step_tokens", [512, 40])
def test_the_poisoned_request_is_the_only_one_to_fail(model, thread_of, part, step_tokens):
    """Its mates, in the batch and in the queue, say what they say alone; chunked prompts or not."""
    thread = thread_of(Brittle(model, part, max_step_tokens=step_tokens))
    mates = [request(str(j), pattern(j, 1 + j % 3, 5 + 9 * j), MODES[j % 3]) for j in range(9)]
    bad = request("bad", [*pattern(3, 1, 50), POISON, 4], ExactMode(), stop=-1)

    async def together() -> list:
        items = [*mates[:3], bad, *mates[3:]]
        return await asyncio.gather(
            *(complete(thread, item) for item in items), return_exceptions=True
        )

    done = asyncio.run(together())
    failure = done.pop(3)
    assert isinstance(failure, PoisonError)
    assert "RuntimeError" in str(failure)
    assert done == [reference.generate(model, CARD, mate) for mate in mates]
    thread.check_health()


class Tangled:
    """A grammar that allows everything, until a part of it can follow the answer no further."""

    def __init__(self, part: str) -> None:
        self.part = part

    def start(self) -> "TangledState":
        return TangledState(self.part)


class TangledState:
    def __init__(self, part: str) -> None:
        self._part, self._said = part, 0

    def _follow(self, part: str) -> None:
        if part == self._part and self._said >= 3:
            raise RequestError("too complex", field="response_format")

    def allowed(self, back: int, tokens: Sequence[int]) -> np.ndarray:
        self._follow("allowed")
        return np.ones((back + 1 + len(tokens), VOCABULARY), np.bool_)

    def admissible(self, tokens: Sequence[int]) -> int:
        self._follow("admissible")
        return len(tokens)

    def forced(self) -> list[int]:
        return []

    def consume(self, tokens: Sequence[int]) -> None:
        self._follow("consume")
        self._said += len(tokens)


@pytest.mark.parametrize("part", ["allowed", "admissible", "consume"])
def test_a_grammar_too_complex_to_be_followed_is_the_requests_own_fault(model, thread_of, part):
    """Whatever part of a step finds out. Guards an engine that ends because of some such requests,
    and a 500 for them."""
    thread = thread_of(Engine(model, CARD, EngineConfig(max_batch=4, max_context=200)))
    mates = [request(str(j), pattern(j, 1 + j, 5), MODES[j]) for j in range(3)]

    async def with_bad(number: int, beside: list) -> list:
        bad = request(f"bad{number}", pattern(3, 1, 5), VerifiedMode(), stop=-1)
        items = [replace(bad, grammar=Tangled(part)), *beside]
        return await asyncio.gather(
            *(complete(thread, item) for item in items), return_exceptions=True
        )

    for number, beside in enumerate([[], [], [], [], mates]):
        failure, *done = asyncio.run(with_bad(number, beside))
        assert isinstance(failure, RequestError)
        assert failure.field == "response_format"
        assert done == [reference.generate(model, CARD, mate) for mate in beside]
    thread.check_health()


def test_one_client_that_asks_again_and_again_ends_no_engine(model, thread_of):
    """With nobody beside it: clients repeat a 500 twice by themselves, and three failed steps in a
    row look like a broken device."""
    thread = thread_of(Brittle(model, "forward"))
    bad = request("bad", [*pattern(3, 1, 5), POISON], ExactMode(), stop=-1)
    for _ in range(7):
        with pytest.raises(PoisonError):
            asyncio.run(complete(thread, bad))
        thread.check_health()
    good = request("good", pattern(1, 1, 5), ExactMode())
    assert asyncio.run(complete(thread, good)) == reference.generate(model, CARD, good)


async def at_once(thread: AsyncEngine, requests: list) -> list:
    answers = (complete(thread, each) for each in requests)
    return await asyncio.gather(*answers, return_exceptions=True)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_numbers_that_are_none_stay_with_the_request_that_has_them(thread_of, prefix_cache):
    """Guards answers beside it, and later ones in its pages: what is hidden has weight 0, and
    0 * NaN is NaN."""
    model = untrained("qwen2")
    with torch.no_grad():
        model.base_model.embed_tokens.weight[POISON] = torch.inf
    config = EngineConfig(max_batch=3, max_context=64, page_size=8, prefix_cache=prefix_cache)
    thread = thread_of(Engine(model, CARD, config))
    good = request("good", [1, 2, 3, 4, 5], ExactMode(), max_new_tokens=12)
    alone = asyncio.run(complete(thread, good))
    for prompt in ([POISON] * 25, [1, 2, POISON, 3, 4]):
        bad = request("bad", prompt, ExactMode(), stop=-1)
        both = asyncio.run(at_once(thread, [bad, good]))
        assert isinstance(both[0], PoisonError)
        assert both[1] == alone
    for _ in range(10):
        assert asyncio.run(complete(thread, good)) == alone


class LonelyRunner(FusedModel):
    """Fails on two sequences of the same length, and on none alone."""

    def hidden_states(self, ids_N, position_N, *others):
        if len(position_N.unique()) < len(position_N):
            raise RuntimeError("out of memory")
        return super().hidden_states(ids_N, position_N, *others)


def test_an_engine_that_fails_on_nobody_alone_ends(model, thread_of):
    """Guards a replica that computes every prompt again for two tokens, and is never replaced."""
    engine = Engine(model, CARD, EngineConfig(max_batch=4, max_context=200))
    engine._backend = DenseBackend(LonelyRunner(model, 220), engine._backend.cache)
    thread = thread_of(engine)
    asked = [request(str(j), [1, 2], ExactMode(), stop=-1, max_new_tokens=60) for j in range(2)]
    done = asyncio.run(at_once(thread, asked))
    assert all(isinstance(each, EngineError) for each in done)


def test_nobody_waits_for_a_thread_that_fails_while_it_closes(model, caplog):
    """Guards clients that hang because another one's request could not be taken away."""
    caplog.set_level(logging.CRITICAL)
    engine = Brittle(model, "always")
    thread = AsyncEngine(engine)
    thread.start()

    async def waiting() -> list:
        asked = [request(str(j), [1, 2], ExactMode(), stop=-1) for j in range(3)]
        return await asyncio.wait_for(at_once(thread, asked), 20)

    def cancel(request_id: str) -> None:
        raise RuntimeError("cannot cancel")

    engine.cancel = cancel  # type: ignore[method-assign]
    assert all(isinstance(each, EngineError) for each in asyncio.run(waiting()))


def test_an_engine_that_fails_on_everything_ends(model, thread_of):
    """Guards a broken device that fails request after request and is never replaced."""
    thread = thread_of(Brittle(model, "always"))
    for number in range(2):
        with pytest.raises(PoisonError):
            asyncio.run(complete(thread, request(str(number), [1, 2], ExactMode())))
        thread.check_health()
    with pytest.raises(EngineError, match="shut down"):
        asyncio.run(complete(thread, request("last", [1, 2], ExactMode())))
    asyncio.run(thread.ended())
    with pytest.raises(EngineError, match="not running"):
        thread.check_health()
