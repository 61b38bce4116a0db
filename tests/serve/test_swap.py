"""`mars-ray update` with another draft adapter, on a real service that is being asked."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.util import list_named_actors
from serve import bigram
from serve.vllm_here import ENVIRONMENT, SMALL, needs_vllm

from mars_ray.cluster.machine import free_port
from mars_ray.config.decode import EngineConfig
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.errors import ModelError
from mars_ray.model.places import adapter_name
from mars_ray.serve.deploy import start, update

pytestmark = pytest.mark.ray
in_vllm = (*needs_vllm, pytest.mark.slow, pytest.mark.timeout(600))

TOKENS = 200
CHAT = [{"role": "user", "content": "count from one to ten"}]
ASKED = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": TOKENS}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("swap")
    base = bigram.write_base(folder / "tiny")
    bigram.write_perfect(base, folder / "good")
    bigram.write_useless(base, folder / "weak")
    bigram.write_broken(base, folder / "broken")
    return folder


# Every step has all masks, whatever they cost.
ENGINES = {
    "mars": EngineConfig(
        max_batch=4, max_context=TOKENS + 60, device="cpu", threads=1, window_control=False
    ),
    "vllm": SMALL.model_copy(update={"masks_by_running": ((1, bigram.DEPTHS),)}),
}


@pytest.fixture(scope="module", params=["mars", pytest.param("vllm", marks=in_vllm)])
def job(request, folder) -> ServeJob:
    return ServeJob(
        checkpoint=str(folder / "tiny"),
        port=free_port(),
        replicas=2,
        cpus_per_replica=0.5,
        environment=ENVIRONMENT if request.param == "vllm" else {},
        engine=ENGINES[request.param].model_copy(update={"draft_adapter": str(folder / "good")}),
        limits=Limits(new_tokens=TOKENS, waiting_requests=40),
    )


@pytest.fixture(scope="module")
def url(ray_cluster, job) -> Iterator[str]:
    yield start(job)
    serve.shutdown()


def with_adapter(job: ServeJob, place: Path | None) -> ServeJob:
    engine = job.engine.model_copy(update={"draft_adapter": place and str(place)})
    return job.model_copy(update={"engine": engine})


def named(folder: Path, name: str | None) -> str | None:
    return name and adapter_name(str(folder / name), folder / name)


def replicas() -> set[str]:
    """Names of the living actors of the model's deployment."""
    actors: Any = list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if "#Replica-tiny#" in actor["name"]}


async def whole(client: httpx.AsyncClient) -> tuple[str, dict]:
    """Text and usage; anything but a 200 raises."""
    reply = await client.post("/v1/chat/completions", json=ASKED)
    reply.raise_for_status()
    body = reply.json()
    return body["choices"][0]["message"]["content"], body["usage"]


async def streamed(client: httpx.AsyncClient) -> tuple[str, dict]:
    """The same of a stream, which must come to its end."""
    async with client.stream("POST", "/v1/chat/completions", json=ASKED | STREAMED) as reply:
        reply.raise_for_status()
        events = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas), chunks[-1]["usage"]


def check_counts(usage: dict, good: str | None) -> set[str | None]:
    """The adapters that served a reply, each with tokens and forwards of its own."""
    mars = usage["mars"]
    served = mars.get("by_adapter") or [
        {"adapter": mars["adapter"]}
        | {"completion_tokens": usage["completion_tokens"], "forwards": mars["forwards"]}
    ]
    assert sum(each["completion_tokens"] for each in served) == usage["completion_tokens"] == TOKENS
    assert sum(each["forwards"] for each in served) == mars["forwards"]
    assert mars["adapter"] in {each["adapter"] for each in served}
    for each in served:
        per_forward = each["completion_tokens"] / each["forwards"]
        assert per_forward == 1 or each["adapter"] is not None
        # Its last drafts may be cut short; that of the other are right by chance.
        if each["forwards"] > 20:
            assert (per_forward > 4) == (each["adapter"] == good)
    return {each["adapter"] for each in served}


def wait_until_in_force(url: str, name: str | None) -> None:
    """At both replicas."""

    def now() -> tuple[int, str | None]:
        (entry,) = httpx.get(f"{url}/v1/mars/status").raise_for_status().json()["data"]
        return entry["replicas"], entry["adapter"]

    wait_until(lambda: now() == (2, name))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240  # vLLM's engines start slowly
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def is_in_metrics(url: str, name: str | None) -> bool:
    """Ray keeps what a replica that is gone has counted for a while."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    sample = "ray_mars_draft_adapter_info{"
    return any(x.startswith(sample) and f'"{name}"' in x and x.endswith(" 1.0") for x in lines)


def test_adapters_are_swapped_under_load_and_nothing_is_lost(url, job, folder):
    """From one to another, to none and back: every reply is whole, `exact`'s text, with counts that
    add up; and no replica is new."""
    good = named(folder, "good")
    before = replicas()
    plan = ["weak", None, "good"]

    async def ask_on(client: httpx.AsyncClient, stop: asyncio.Event) -> list[tuple[str, dict]]:
        replies = []
        while not stop.is_set():
            replies.append(await whole(client))
            replies.append(await streamed(client))
        return replies

    async def swap_under_load() -> tuple[str, list[tuple[str, dict]]]:
        stop = asyncio.Event()
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            exact = await client.post("/v1/chat/completions", json=ASKED | {"mode": "exact"})
            asking = [asyncio.create_task(ask_on(client, stop)) for _ in range(6)]
            for name in plan:
                place = folder / name if name else None
                await asyncio.to_thread(update, with_adapter(job, place))
                await asyncio.sleep(0.3)
            stop.set()
            replies = [reply for own in await asyncio.gather(*asking) for reply in own]
        return exact.json()["choices"][0]["message"]["content"], replies

    exact, replies = asyncio.run(swap_under_load())
    assert {text for text, _ in replies} == {exact}
    seen = set().union(*(check_counts(usage, good) for _, usage in replies))
    assert seen == {named(folder, name) for name in plan}
    assert replicas() == before
    wait_until_in_force(url, good)


def test_an_adapter_that_cannot_be_loaded_changes_nothing(url, job, folder):
    """The command says why, and the service goes on with the one it has."""
    before = replicas()
    with pytest.raises(ModelError, match="contains NaN or Inf"):
        update(with_adapter(job, folder / "broken"))
    assert replicas() == before
    wait_until_in_force(url, named(folder, "good"))


@pytest.mark.long
def test_a_replica_that_starts_later_has_the_newest_adapter(url, job, folder):
    """Guards replicas that Serve starts from the job that was deployed, which names another one;
    the same job again is then an update like any other."""
    update(with_adapter(job, folder / "weak"))
    before = replicas()
    victim, *_ = sorted(before)
    (actor,) = [a for a in list_named_actors(all_namespaces=True) if a["name"] == victim]
    ray.kill(ray.get_actor(**actor))
    wait_until(lambda: len(replicas() - before) == 1)
    wait_until_in_force(url, named(folder, "weak"))
    wait_until(lambda: is_in_metrics(url, named(folder, "weak")))
    before = replicas()
    update(with_adapter(job, folder / "weak"))
    assert not replicas() & before
    wait_until_in_force(url, named(folder, "weak"))
