"""A service of two replicas on a real cluster, and what may happen to it while clients ask."""

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import ray
import torch
from ray import cloudpickle, serve
from ray.exceptions import RayActorError
from ray.util import list_named_actors
from serve.forwards import break_down, hold, run_in, slow_down
from transformers import AutoModelForCausalLM, AutoTokenizer

from mars_ray.cluster.machine import free_port
from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.config.scaling import ScalingConfig, ThresholdBounds
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.errors import ConfigError
from mars_ray.serve.deploy import APP_NAME, start, update
from mars_ray.serve.protocol import ErrorInfo, GenerationRequest, Turn
from mars_ray.serve.threshold_actor import publish

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
        # Without drafts no threshold is ever used, and those of random weights do not pay.
        engine=EngineConfig(
            max_batch=4, max_context=300, device="cpu", threads=1, window_control=False
        ),
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


def test_a_replica_killed_while_it_writes(url, tmp_path):
    """Streams of the dead one end with an error event, all the rest is whole and right."""
    slow = tmp_path / "slow"
    for actor in replicas():
        run_in(actor["name"], slow_down(0.05, slow))

    async def ask_and_kill() -> tuple[str, list[list[str]], list[str]]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            expected = await whole(client)
            slow.touch()  # 150 tokens take 7.5 seconds and more
            streams = [stream(client) for _ in range(6)]
            begun = [[await anext(events)] for events in streams]
            unseen = [asyncio.create_task(whole(client)) for _ in range(8)]
            await asyncio.sleep(0.1)
            victim = random.choice(replicas())
            ray.kill(ray.get_actor(**victim))
            slow.unlink()
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


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(url, tmp_path):
    """Two replicas with 4 + 40 places; what is accepted is answered, the rest are 429s."""
    held = tmp_path / "held"
    held.touch()
    for actor in replicas():
        run_in(actor["name"], hold(held))

    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/chat/completions", json=ASKED | {"max_tokens": 4, "n": 8})

    async def flood() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            asked = [asyncio.create_task(ask(client)) for _ in range(16)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            held.unlink()
            return list(await asyncio.gather(*asked))

    replies = asyncio.run(flood())
    refused = [reply for reply in replies if reply.status_code == 429]
    assert 1 <= len(refused) < len(replies)
    assert {reply.status_code for reply in replies} == {200, 429}
    assert all(int(reply.headers["Retry-After"]) >= 1 for reply in refused)


class Breaks:
    """Once it is compared, its process has no device any more."""

    def __gt__(self, other: object) -> bool:
        break_down()
        return False


def test_a_replica_whose_engine_fails_gives_way_at_once(url, job):
    """Guards a dead engine in a living replica: as it refuses at once it is the least loaded one,
    and what it refuses would come back to it until nobody asks any more."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    breaks = Sampling.model_construct(temperature=1.0, top_k=Breaks())
    prompt = (Turn("user", "break " * 20),)
    handle = serve.get_deployment_handle(job.deployment, APP_NAME).options(stream=True)

    async def fails_for_good(number: int) -> bool:
        sampling = Sampling() if number else breaks
        call = GenerationRequest(f"broken-{number}", (prompt,), ExactMode(), sampling, 4, 4)
        try:
            said = [message async for message in handle.generate.remote(call)]
        except RayActorError:
            return True
        assert isinstance(said[-1], ErrorInfo)
        return said[-1].code == "engine_error"

    async def break_one_and_ask() -> list[str]:
        before = {actor["name"] for actor in replicas()}
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            expected = await whole(client)
            # Three steps in a row of one replica: the beginning is long enough to be known again.
            assert [await fails_for_good(number) for number in range(3)] == [False, False, True]
            texts = await asyncio.gather(*(whole(client) for _ in range(16)))
        await eventually(lambda: len({a["name"] for a in replicas()} - before) == 1)
        return [expected, *texts]

    assert len(set(asyncio.run(break_one_and_ask()))) == 1


def metrics_page(url: str) -> str:
    reply = httpx.get(f"{url}/metrics", timeout=30).raise_for_status()
    assert reply.headers["content-type"].startswith("text/plain")
    return reply.text


def test_the_service_shows_its_own_metrics(url):
    """For scrapers that know nothing of Ray's nodes."""
    ours = {"vllm:request_success_total", "ray_mars_forwards_total"}
    expected = ours | {"ray_serve_num_http_requests_total"}
    others = ("ray_node_", "ray_serve_http_request_latency")

    def is_shown() -> bool:
        try:
            shown = families(metrics_page(url))
        except httpx.HTTPStatusError:
            return False  # the node did not answer in time, and the page says so
        assert not [name for name in shown if name.startswith(others)]
        return expected <= shown

    asyncio.run(eventually(is_shown))


def families(page: str) -> set[str]:
    return {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}


def thresholds(url: str) -> set[float]:
    """In force for requests of the `fast` quality, in two modes and at both replicas."""
    seen = set()
    for mode in ("verified", "confidence") * 4:
        body = ASKED | {"max_tokens": 12, "mode": mode, "quality": "fast"}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        seen.add(reply.raise_for_status().json()["usage"]["mars"]["threshold"])
    return seen


def test_the_set_point_changes_while_the_service_runs(url):
    """At every replica, also at one that starts later; nobody is restarted for it."""
    assert thresholds(url) == {1.0}
    before = {actor["name"] for actor in replicas()}
    publish("mars", 0.25)

    async def followed(threshold: float) -> None:
        await eventually(lambda: thresholds(url) == {threshold}, 30)

    asyncio.run(followed(0.25))
    assert {actor["name"] for actor in replicas()} == before
    ray.kill(ray.get_actor(**replicas()[0]))

    async def replaced() -> None:
        await eventually(lambda: len({a["name"] for a in replicas()} - before) == 1)

    asyncio.run(replaced())
    asyncio.run(followed(0.25))
    with pytest.raises(ConfigError, match="no service"):
        publish("other", 0.5)


def greedy(checkpoint: Path) -> str:
    """Of plain transformers."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False)
    text = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.rstrip("\ufffd")


def test_an_update_under_load_fails_no_request(url, job, checkpoint, second_checkpoint):
    """Every reply is whole, of the old checkpoint or the new one; in the end all are of the new,
    and the threshold is that of the new job."""
    old, new = greedy(checkpoint), greedy(second_checkpoint)
    assert old != new
    scaling = ScalingConfig(threshold=ThresholdBounds(set_point=0.5))
    changed = job.model_copy(update={"checkpoint": str(second_checkpoint), "scaling": scaling})

    async def ask_on(client: httpx.AsyncClient, stop: asyncio.Event) -> list[str]:
        texts = []
        while not stop.is_set():
            texts.append(await whole(client))
            events = [event async for event in stream(client)]
            assert events[-1] == "[DONE]"
            texts.append(text_of(events))
        return texts

    async def update_under_load() -> tuple[list[str], str]:
        stop = asyncio.Event()
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            asking = [asyncio.create_task(ask_on(client, stop)) for _ in range(4)]
            await asyncio.to_thread(update, changed)
            stop.set()
            texts = [text for own in await asyncio.gather(*asking) for text in own]
            return texts, await whole(client)

    texts, last = asyncio.run(update_under_load())
    assert set(texts) <= {old, new}
    assert old in texts
    assert last == new

    async def followed() -> None:
        await eventually(lambda: thresholds(url) == {0.5}, 30)

    asyncio.run(followed())
    with pytest.raises(ConfigError, match="port="):
        update(changed.model_copy(update={"port": free_port()}))


@pytest.mark.long
def test_the_node_of_a_replica_is_lost(checkpoint):
    """Half of the engines gone at once: requests go on at the other half, and none fails."""
    program = Path(__file__).with_name("lost_node.py")
    words = [sys.executable, str(program), str(checkpoint), str(free_port())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["statuses"]) == {"200"}, result["others"]
    assert result["statuses"]["200"] > 20
    assert len(result["texts"]) == 1
