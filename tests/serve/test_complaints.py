"""What users of Ray Serve have complained of, tried on a service of two replicas."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.util import list_named_actors
from serve.forwards import run_in, slow_down

from mars_ray.cluster.machine import free_port
from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.serve.deploy import start

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STUCK_S = 6
TOKENS = 40
CHAT = [{"role": "user", "content": "count from one to ten"}]
ASKED = {"model": "mars", "messages": CHAT, "temperature": 0}


@pytest.fixture(scope="module")
def job(checkpoint) -> ServeJob:
    return ServeJob(
        checkpoint=str(checkpoint),
        port=free_port(),
        model_name="mars",
        replicas=2,
        cpus_per_replica=0.5,
        default_mode=ExactMode(),
        step_timeout_s=STUCK_S,
        engine=EngineConfig(
            max_batch=4, max_context=300, device="cpu", threads=1, window_control=False
        ),
        limits=Limits(new_tokens=200, waiting_requests=40),
    )


@pytest.fixture(scope="module")
def url(ray_cluster, job) -> Iterator[str]:
    yield start(job)
    serve.shutdown()


def replicas() -> set[str]:
    """Names of the living actors of the model's deployment."""
    actors: Any = list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if "#Replica-mars#" in actor["name"]}


async def events(client: httpx.AsyncClient, tokens: int) -> AsyncIterator[str]:
    """The events of a streamed answer; a connection that is cut raises."""
    body = ASKED | {"max_tokens": tokens, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line:
                yield line.removeprefix("data: ")


async def streamed(client: httpx.AsyncClient, tokens: int) -> str:
    """How a stream ends: [DONE], or the code of its error."""
    last = [event async for event in events(client, tokens)][-1]
    return last if last == "[DONE]" else json.loads(last)["error"]["code"]


async def whole(client: httpx.AsyncClient, tokens: int) -> str:
    """An answer that is not streamed; anything but a 200 raises."""
    reply = await client.post("/v1/chat/completions", json=ASKED | {"max_tokens": tokens})
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]


async def load(url: str) -> tuple[list[str], list[str]]:
    """Endings of streams and texts of answers that both replicas have to do with."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        streams = [asyncio.create_task(streamed(client, 12)) for _ in range(4)]
        answers = [asyncio.create_task(whole(client, 12)) for _ in range(4)]
        return await asyncio.gather(*streams), await asyncio.gather(*answers)


def wait_for_another(before: set[str], limit_s: float) -> None:
    """One replica has been replaced, and only one."""
    deadline = time.monotonic() + limit_s
    while len(replicas()) != 2 or replicas() == before:
        assert time.monotonic() < deadline, (before, replicas())
        time.sleep(0.2)
    assert len(replicas() - before) == 1


def logged() -> str:
    """What the cluster's processes have written to their standard error."""
    directory = Path(ray._private.worker._global_node.get_logs_dir_path())
    return "".join(path.read_text(errors="replace") for path in directory.glob("worker-*.err"))


@pytest.mark.long
def test_a_busy_replica_stays_and_one_that_stands_still_is_replaced(url):
    """Guards both directions of a health check (ray#61263, #54070, #46702): answers that take
    longer than the limit, of steps that do not; then an engine that is alive and does nothing, of
    which Serve alone would keep the clients waiting."""
    before = replicas()
    for name in before:
        run_in(name, slow_down(STUCK_S / 6))
    begun = time.monotonic()
    endings, texts = asyncio.run(load(url))
    assert time.monotonic() - begun > 1.5 * STUCK_S, "it was not busy for long enough"
    assert (set(endings), len(set(texts))) == ({"[DONE]"}, 1)
    assert replicas() == before

    run_in(min(before), slow_down(600))
    endings, again = asyncio.run(load(url))
    # Of what had begun it ends; all the rest is answered by the other replica.
    assert set(endings) <= {"[DONE]", "replica_lost"}
    assert set(again) == set(texts)
    wait_for_another(before, 60)
    assert min(before) not in replicas()
    assert "in slow_forward" in logged(), "it does not say where it stood"


@pytest.mark.long
def test_an_upgrade_under_load_loses_none_of_300_requests(url, job, second_checkpoint):
    """Guards a rollout that drops requests (kuberay#3166), by the command that users have."""
    before = replicas()
    table = {
        "port": job.port,
        "model_name": "mars",
        "replicas": 2,
        "cpus_per_replica": 0.5,
        "default_mode.type": "exact",
        "engine.max_batch": 4,
        "engine.max_context": 300,
        "engine.device": "cpu",
        "engine.threads": 1,
        "limits.new_tokens": 200,
    }
    words = [sys.executable, "-m", "mars_ray", "update", str(second_checkpoint)]
    words += [f"{key}={json.dumps(value)}" for key, value in table.items()]
    address = ray.get_runtime_context().gcs_address
    environment = os.environ | {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
    failed: list[str] = []
    answered: list[str] = []

    async def ask_on(client: httpx.AsyncClient, is_over: asyncio.Event) -> None:
        while not is_over.is_set() or len(answered) < 300:
            for ask in (streamed, whole):
                try:
                    answered.append(await ask(client, TOKENS))
                except httpx.HTTPError as error:
                    failed.append(repr(error))

    async def update_under_load() -> None:
        is_over = asyncio.Event()
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            asking = [asyncio.create_task(ask_on(client, is_over)) for _ in range(6)]
            updating = await asyncio.create_subprocess_exec(*words, env=environment)
            code = await updating.wait()
            is_over.set()
            await asyncio.gather(*asking)
            assert code == 0

    asyncio.run(update_under_load())
    assert not failed
    assert len(answered) >= 300
    # The end of a stream, and the texts of the old model and of the new one.
    assert "[DONE]" in answered
    assert len(set(answered)) == 3
    assert not replicas() & before
