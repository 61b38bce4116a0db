"""A service whose replicas run vLLM: the same HTTP, on a real cluster, with the real engine."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import psutil
import pytest
import ray
from processes import titled
from ray import serve
from serve.command import wait_for, wait_until_free
from serve.vllm_here import ENVIRONMENT, SMALL, needs_vllm

from mars_ray.cluster.machine import free_port
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.serve.deploy import start
from mars_ray.serve.threshold_actor import publish

pytestmark = [pytest.mark.ray, pytest.mark.slow, *needs_vllm]

CHAT = [{"role": "user", "content": "count from one to ten"}]
TOKENS = 150
ASKED = {"model": "mars", "messages": CHAT, "temperature": 0, "mode": "exact"}
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "name": {"enum": ["one", "two"]}},
    "required": ["count", "name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def job(checkpoint) -> ServeJob:
    return ServeJob(
        checkpoint=str(checkpoint),
        port=free_port(),
        model_name="mars",
        replicas=2,
        cpus_per_replica=0.5,
        environment=ENVIRONMENT,
        engine=SMALL,
        limits=Limits(new_tokens=TOKENS, waiting_requests=40),
    )


@pytest.fixture(scope="module")
def url(ray_cluster, job) -> Iterator[str]:
    url = start(job)
    yield url
    wait_until_free(url)
    serve.shutdown()


@pytest.fixture(scope="module")
def official(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def asked(**fields) -> dict:
    return {"model": "mars", "messages": CHAT, "temperature": 0, "max_tokens": 24} | fields


def test_whole_and_streamed_answers_are_the_same(official):
    """Each token is a forward of its own, and each is sent though they come fast."""
    exact = {"extra_body": {"mode": "exact"}}
    reply = official.chat.completions.create(**asked(), **exact)
    assert reply.usage.completion_tokens == 24
    assert reply.usage.model_extra["mars"]["forwards"] == 24
    with official.chat.completions.create(**asked(stream=True), **exact) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == reply.choices[0].message.content


def test_logprobs_are_those_of_the_model(official):
    """At temperature 0 the chosen token is the likeliest; a penalty does not change the numbers."""
    reply = official.chat.completions.create(**asked(logprobs=True, top_logprobs=3))
    entries = reply.choices[0].logprobs.content
    assert len(entries) == 24
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)


def test_a_schema_is_followed(official):
    """Greedy and sampled, from a model that talks nonsense."""
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    for temperature in (0, 1):
        reply = official.chat.completions.create(
            **asked(temperature=temperature, max_tokens=TOKENS, response_format=form, seed=3)
        )
        choice = reply.choices[0]
        if choice.finish_reason == "stop":
            said = json.loads(choice.message.content)
            assert said["name"] in ("one", "two")
        assert choice.message.content.lstrip().startswith("{")


def test_what_vllm_does_not_do_is_refused_by_name(official):
    """Guards a field that would be dropped without a word."""
    for body, param in (
        ({"mode": "confidence"}, "mode"),
        ({"temperature": 0.001}, "temperature"),
        ({"mode": "exact", "quality_budget": 0.1}, "quality_budget"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            official.chat.completions.create(**asked(), extra_body=body)
        assert caught.value.param == param


def test_a_budget_of_nothing_is_the_models_text(official):
    """And one that is spent is told nobody as a threshold, which vLLM's own process moves."""
    texts = []
    for extra in ({"mode": "exact"}, {"mode": "verified", "quality_budget": 0.0}):
        reply = official.chat.completions.create(**asked(max_tokens=60), extra_body=extra)
        texts.append(reply.choices[0].message.content)
    assert texts[0] == texts[1]
    assert reply.usage.model_extra["mars"]["threshold"] is None


def test_the_policys_set_point_is_that_of_requests(url, official):
    """At both replicas, for a quality that tolerates it; the others stay lossless."""

    def thresholds(quality: str) -> set[float]:
        extra = {"mode": "verified", "quality": quality}
        replies = [
            official.chat.completions.create(**asked(max_tokens=12), extra_body=extra)
            for _ in range(6)
        ]
        return {reply.usage.model_extra["mars"]["threshold"] for reply in replies}

    for set_point in (0.25, 1.0):
        publish("mars", set_point)
        wait_for(lambda wanted=set_point: thresholds("fast") == {wanted})
        assert thresholds("lossless") == {1.0}


def test_who_leaves_frees_the_engine(url, official):
    """A client that goes in the middle of a stream, long before the answer's end."""
    with official.chat.completions.create(**asked(stream=True, max_tokens=TOKENS)) as stream:
        next(iter(stream))
    wait_until_free(url)


async def events_of(client: httpx.AsyncClient) -> AsyncIterator[str]:
    body = asked(stream=True, max_tokens=TOKENS)
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line:
                yield line.removeprefix("data: ")


@pytest.mark.parametrize("victim", ["replica", "engine"])
def test_a_process_killed_while_it_writes(url, victim):
    """Streams of the dead replica end with an error event, others are whole. Neither the replica
    outlives its engine nor the engine its replica, and others come in their place."""
    wait_for_both(url)
    before = engines()
    dying = replica_processes()[0]

    async def ask_and_kill() -> tuple[list[list[str]], httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            streams = [events_of(client) for _ in range(4)]
            begun = [[await anext(events)] for events in streams]
            (dying if victim == "replica" else engine_of(dying)).kill()
            for events, own in zip(streams, begun, strict=True):
                own.extend([event async for event in events])
            reply = await client.post("/v1/chat/completions", json=asked())
            return begun, reply

    ended, reply = asyncio.run(ask_and_kill())
    assert reply.status_code == 200
    cut = [events for events in ended if events[-1] != "[DONE]"]
    assert 1 <= len(cut) < 4
    for events in cut:
        assert json.loads(events[-1])["error"]["code"] == "replica_lost"
    wait_for(lambda: not dying.is_running())
    wait_for(lambda: len([engine for engine in before if engine.is_running()]) == 1)
    wait_for_both(url)


def wait_for_both(url: str) -> None:
    """A start may take a minute, and more beside other work."""
    begin = time.monotonic()
    while httpx.get(f"{url}/v1/mars/status").json()["data"][0]["replicas"] < 2:
        assert time.monotonic() - begin < 240
        time.sleep(1)


def replica_processes() -> list[psutil.Process]:
    raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
    return titled(psutil.Process(raylet).children(), "Replica-mars")


def engine_of(replica: psutil.Process) -> psutil.Process:
    """Of vLLM's processes the one that schedules steps."""
    (engine,) = [
        child
        for child in replica.children(recursive=True)
        if child.name().startswith("VLLM::EngineC")
    ]
    return engine


def engines() -> set[psutil.Process]:
    """The engines of all replicas that have started theirs."""
    found = set()
    for replica in replica_processes():
        with contextlib.suppress(ValueError, psutil.Error):
            found.add(engine_of(replica))
    return found
