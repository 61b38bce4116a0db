"""What becomes of a request whose replica is lost; the replicas here only pretend."""

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any, Self, cast

import pytest
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from serve.asking import ASK

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import ServeJob
from mars_ray.serve.ingress import client as replica_client
from mars_ray.serve.ingress.client import ReplicaClient, retried
from mars_ray.serve.openai.request_models import ApiError
from mars_ray.serve.protocol import Envelope, ErrorInfo, GenerationRequest, Message, Turn, Used

CALL = GenerationRequest("id", ((Turn("user", ASK),),), ExactMode(), Sampling(), 10, 100)
FIRST, LAST = Envelope("a", Used(1, 0, 1, 1)), Envelope("b", Used(1, 0, 2, 2), "stop")
BROKEN = ErrorInfo(503, "the engine was shut down", code="engine_error")


class Reply(DeploymentResponseGenerator):
    """Says its messages in turn; it is lost where one is an exception, and waits at a number."""

    def __init__(self, messages: tuple[Message | Exception | float, ...]) -> None:
        self._messages = iter(messages)
        self.is_cancelled = False

    async def __anext__(self) -> Message:
        for message in self._messages:
            if isinstance(message, Exception):
                raise message
            if not isinstance(message, float):
                return message
            await asyncio.sleep(message)
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.is_cancelled = True


class Replicas:
    """A handle whose replicas each say their messages in turn."""

    def __init__(self, *saying: tuple[Message | Exception | float, ...]) -> None:
        self.replies = [Reply(messages) for messages in saying]
        self.calls: list[GenerationRequest] = []

    def options(self, **_options: Any) -> Self:
        return self

    @property
    def generate(self) -> Self:
        return self

    def remote(self, call: GenerationRequest) -> Reply:
        self.calls.append(call)
        return self.replies[len(self.calls) - 1]

    @property
    def cancelled(self) -> list[bool]:
        return [reply.is_cancelled for reply in self.replies]


def client_of(replicas: Replicas) -> ReplicaClient:
    return ReplicaClient(cast(DeploymentHandle, replicas), ServeJob(checkpoint="m"))


def heard(replicas: Replicas, call: GenerationRequest) -> list[Message]:
    async def collect() -> list[Message]:
        async with asyncio.timeout(10):
            return [message async for message in client_of(replicas).generate(call)]

    return asyncio.run(collect())


LOST = RayActorError()
# As while an update's replica does not start, and the old one is gone.
NONE = DeploymentUnavailableError(DeploymentID("Replica-tiny", "mars-ray"))


@pytest.mark.parametrize("reply", [(FIRST, LAST), (LAST,)])
@pytest.mark.parametrize("lost", [(LOST,), (BROKEN,), (NONE,)])
def test_what_has_not_begun_is_asked_elsewhere(reply, lost):
    """The same call with the same seed, streamed or not; a dead engine in a living replica counts
    as lost."""
    replicas = Replicas(lost, lost, reply)
    assert heard(replicas, CALL) == list(reply)
    assert replicas.cancelled == [True, True, False]
    assert {call.sampling.seed for call in replicas.calls} == {CALL.sampling.seed}


def test_a_stream_that_has_begun_ends_with_an_error():
    """Its client has text that another replica would say again."""
    (first, error) = heard(Replicas((FIRST, LOST)), CALL)
    assert first == FIRST
    assert isinstance(error, ErrorInfo)
    assert (error.status, error.code) == (503, "replica_lost")


def test_a_reply_is_over_with_its_last_envelope():
    """Guards an error behind a whole answer, whose replica ends just then."""
    replicas = Replicas((FIRST, LAST, LOST))
    assert heard(replicas, CALL) == [FIRST, LAST]
    assert replicas.cancelled == [False]


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


def test_time_is_over_also_where_no_replica_looks_at_the_clock(monkeypatch):
    """Guards a client that waits for minutes: none is there, as while a new one loads its model."""
    monkeypatch.setattr(replica_client, "_GRACE_S", 0.0)
    replicas = Replicas((1000.0, FIRST))
    (late,) = heard(replicas, replace(CALL, timeout_s=0.05))
    assert isinstance(late, ErrorInfo)
    assert (late.status, late.param, late.code) == (408, "timeout_s", "deadline_exceeded")
    assert replicas.cancelled == [True]


def test_a_stream_that_has_begun_is_left_to_its_replica(monkeypatch):
    """There the clock is looked at between steps, and what is on its way still arrives."""
    monkeypatch.setattr(replica_client, "_GRACE_S", 0.0)
    replicas = Replicas((FIRST, 0.7, LAST))
    assert heard(replicas, replace(CALL, timeout_s=0.5)) == [FIRST, LAST]
    assert replicas.cancelled == [False]


def test_closing_cancels_what_is_under_way_at_the_replica():
    """Guards an engine that writes on for a client that has left, and for one that never reads."""
    replicas = Replicas((FIRST, 1000.0))

    async def leave() -> None:
        messages = client_of(replicas).generate(CALL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                while True:
                    await anext(messages)
        await messages.aclose()

    asyncio.run(leave())
    assert replicas.cancelled == [True]


def test_a_broken_engine_is_not_left_with_a_request():
    """The replica that is asked next does the work; one that has ended has nothing to cancel."""
    replicas = Replicas((BROKEN, 1000.0), (FIRST, LAST))
    assert heard(replicas, CALL) == [FIRST, LAST]
    assert replicas.cancelled == [True, False]


def test_short_questions_are_asked_again_too():
    """Tokens of a prompt, from whichever replica is there."""
    replies = iter([LOST, NONE, "tokens", *[NONE] * 3])

    async def ask() -> str:
        reply = next(replies)
        if isinstance(reply, Exception):
            raise reply
        return reply

    assert asyncio.run(retried(ask)) == "tokens"
    with pytest.raises(ApiError):
        asyncio.run(retried(ask))
