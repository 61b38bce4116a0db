"""A service of two replicas on a real cluster, and what may happen to it while clients ask."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
import ray
from ray import serve
from ray.util import list_named_actors
from serve.real_port import free_port

from mars_ray.config.decode import EngineConfig, ExactMode
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.serve.build import start

pytestmark = pytest.mark.ray

CHAT = [{"role": "user", "content": "count from one to ten"}]
TOKENS = 150
ASKED = {"model": "mars", "messages": CHAT, "temperature": 0, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def job(checkpoint) -> ServeJob:
    return ServeJob(
        checkpoint=str(checkpoint),
        port=free_port(),
        model_name="mars",
        replicas=2,
        cpus_per_replica=0.5,
        default_mode=ExactMode(),
        engine=EngineConfig(max_batch=4, max_context=300, device="cpu", threads=1),
        limits=Limits(new_tokens=200, waiting_requests=40),
    )


@pytest.fixture(scope="module")
def url(ray_cluster, job) -> Iterator[str]:
    yield start(job)
    serve.shutdown()


def replicas() -> list[dict]:
    """The living actors of the model's deployment."""
    actors = list_named_actors(all_namespaces=True)
    return [actor for actor in actors if "#Replica-mars#" in actor["name"]]


async def whole(client: httpx.AsyncClient) -> str:
    """An answer that is not streamed; anything but a 200 raises."""
    reply = await client.post("/v1/chat/completions", json=ASKED)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]


async def stream(client: httpx.AsyncClient) -> AsyncIterator[str]:
    """The events of a streamed answer; a connection that is cut raises."""
    body = ASKED | {"stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line:
                yield line.removeprefix("data: ")


def text_of(events: list[str]) -> str:
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if "choices" in chunk]
    return "".join(delta.get("content", "") for delta in deltas)


async def eventually(condition: Callable[[], bool], limit_s: float = 60) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < limit_s
        await asyncio.sleep(0.1)


def test_a_replica_killed_while_it_writes(url):
    """Streams of the dead one end with an error event, all the rest is whole and right."""

    async def ask_and_kill() -> tuple[str, list[list[str]], list[str]]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            expected = await whole(client)
            streams = [stream(client) for _ in range(6)]
            begun = [[await anext(events)] for events in streams]
            unseen = [asyncio.create_task(whole(client)) for _ in range(8)]
            await asyncio.sleep(0.1)
            victim = random.choice(replicas())
            ray.kill(ray.get_actor(**victim))
            for events, own in zip(streams, begun, strict=True):
                own.extend([event async for event in events])
            texts = list(await asyncio.gather(*unseen))
            texts += [await whole(client) for _ in range(3)]
            await eventually(lambda: len(replicas()) == 2)
            return expected, begun, texts

    expected, ended, texts = asyncio.run(ask_and_kill())
    assert set(texts) == {expected}
    cut = [events for events in ended if events[-1] != "[DONE]"]
    assert 1 <= len(cut) <= 5
    for events in ended:
        if events in cut:
            error = json.loads(events.pop())["error"]
            assert (error["code"], error["type"]) == ("replica_lost", "server_error")
            assert expected.startswith(text_of(events))
        else:
            assert text_of(events) == expected
