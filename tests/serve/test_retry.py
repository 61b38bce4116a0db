"""What becomes of a request whose replica is lost; the replicas here only pretend."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from serve.asking import ASK

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.serve.ingress import replica_client
from mars_ray.serve.ingress.replica_client import answered, insisted
from mars_ray.serve.openai.request_models import ApiError
from mars_ray.serve.protocol import ErrorInfo, Finish, GenerationRequest, Message, OutputDelta, Turn

CALL = GenerationRequest("id", ((Turn("user", ASK),),), ExactMode(), Sampling(), 10, 100)
FIRST, LAST = OutputDelta("a"), OutputDelta("b", Finish("stop", 1, 2, 2))
BROKEN = ErrorInfo(503, "the engine was shut down", code="engine_error")


class Replicas:
    """Each says its messages in turn, and is lost where one is an exception."""

    def __init__(self, *saying: tuple[Message | Exception, ...]) -> None:
        self._saying = iter(saying)
        self.calls: list[GenerationRequest] = []

    async def ask(self, call: GenerationRequest) -> AsyncGenerator[Message, None]:
        self.calls.append(call)
        for message in next(self._saying):
            if isinstance(message, Exception):
                raise message
            yield message


def heard(replicas: Replicas, call: GenerationRequest) -> list[Message]:
    async def collect() -> list[Message]:
        return [message async for message in answered(replicas.ask, call)]

    return asyncio.run(collect())


LOST = RayActorError()
# As while an update's replica does not start, and the old one is gone.
NONE = DeploymentUnavailableError(DeploymentID("Replica-tiny", "mars-ray"))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("lost", [(LOST,), (BROKEN,), (NONE,)])
def test_what_has_not_begun_is_asked_elsewhere(is_streamed, lost):
    """The same call with the same seed; a dead engine in a living replica counts as lost."""
    replicas = Replicas(lost, lost, (FIRST, LAST))
    assert heard(replicas, replace(CALL, is_streamed=is_streamed)) == [FIRST, LAST]
    assert {call.sampling.seed for call in replicas.calls} == {CALL.sampling.seed}


def test_a_stream_that_has_begun_ends_with_an_error():
    """Its client has text that another replica would say again."""
    (first, error) = heard(Replicas((FIRST, LOST)), CALL)
    assert first == FIRST
    assert isinstance(error, ErrorInfo)
    assert (error.status, error.code) == (503, "replica_lost")


@pytest.mark.parametrize("delivery", ["whole", "steps"])
def test_an_answer_that_is_not_streamed_begins_anew(delivery):
    """Nothing of the first attempt is left in it, though the ingress has heard of every step."""
    whole = replace(CALL, delivery=delivery, is_streamed=False)
    assert heard(Replicas((FIRST, FIRST, LOST), (FIRST, LAST)), whole) == [FIRST, LAST]


def test_after_some_tries_it_is_a_503():
    """Guards a request that goes from one replica to the next and ends them all."""
    replicas = Replicas(*[(LOST,), (NONE,)] * 5)
    (error,) = heard(replicas, CALL)
    assert isinstance(error, ErrorInfo)
    assert (error.status, error.retry_after_s) == (503, 1)
    assert len(replicas.calls) == 3


def test_refusals_are_not_asked_for_again():
    """They would be the same everywhere, or are right where they are."""
    full = ErrorInfo(429, "full", code="too_many_requests")
    replicas = Replicas((full,))
    assert heard(replicas, CALL) == [full]


def test_the_time_of_a_request_runs_on():
    """Guards a deadline that begins anew with each try."""
    replicas = Replicas((LOST,), (FIRST, LAST))
    begin = time.monotonic()
    heard(replicas, replace(CALL, timeout_s=5.0))
    first, second = (call.timeout_s for call in replicas.calls)
    assert first == 5.0
    assert 5.0 - (time.monotonic() - begin) <= second < 5.0


@pytest.mark.parametrize("is_streamed", [False, True])
def test_time_is_over_also_where_no_replica_looks_at_the_clock(monkeypatch, is_streamed):
    """Guards a client that waits for minutes: none is there, as while a new one loads its model."""
    monkeypatch.setattr(replica_client, "_GRACE_S", 0.0)
    closed = []

    async def never(call: GenerationRequest) -> AsyncGenerator[Message, None]:
        try:
            await asyncio.sleep(1000)
            yield FIRST
        finally:
            closed.append(call.id)

    async def collect() -> list[Message]:
        call = replace(CALL, timeout_s=0.05, is_streamed=is_streamed)
        async with asyncio.timeout(10):
            return [message async for message in answered(never, call)]

    (late,) = asyncio.run(collect())
    assert isinstance(late, ErrorInfo)
    assert (late.status, late.param, late.code) == (408, "timeout_s", "deadline_exceeded")
    assert closed == [CALL.id]


def test_a_stream_that_has_begun_is_left_to_its_replica(monkeypatch):
    """There the clock is looked at between steps, and what is on its way still arrives."""
    monkeypatch.setattr(replica_client, "_GRACE_S", 0.0)

    async def slow(_call: GenerationRequest) -> AsyncGenerator[Message, None]:
        yield FIRST
        await asyncio.sleep(0.1)
        yield LAST

    async def collect() -> list[Message]:
        return [message async for message in answered(slow, replace(CALL, timeout_s=0.05))]

    assert asyncio.run(collect()) == [FIRST, LAST]


def test_short_questions_are_asked_again_too():
    """Tokens of a prompt, from whichever replica is there."""
    replies = iter([LOST, NONE, "tokens", *[NONE] * 3])

    async def ask() -> str:
        reply = next(replies)
        if isinstance(reply, Exception):
            raise reply
        return reply

    assert asyncio.run(insisted(ask)) == "tokens"
    with pytest.raises(ApiError):
        asyncio.run(insisted(ask))
