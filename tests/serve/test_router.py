"""Prefix-aware routing on a real Serve: replicas that say who they are."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.serve.ingress.router import BLOCK_CHARS, MAX_IMBALANCE, PrefixRouter
from mars_ray.serve.protocol import GenerationRequest, Turn

pytestmark = pytest.mark.ray

TURNS = 5
# Of three conversations, each with five turns: by chance all stay with odds of 1 to 4,096.
TOPICS = ("tides", "bread", "chess")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a file for each request that a replica holds, until there is one named `go`."""
    return tmp_path_factory.mktemp("begun")


@pytest.fixture(scope="module")
def handle(ray_cluster, begun: Path) -> Iterator[DeploymentHandle]:
    # Defined here, so that it travels to the replicas with its code.
    class Who:
        def __init__(self, begun: Path) -> None:
            self.begun = begun

        def pid(self, _call: GenerationRequest) -> int:
            return os.getpid()

        async def held_pid(self, _call: GenerationRequest) -> int:
            (self.begun / uuid4().hex).touch()
            while not (self.begun / "go").exists():
                await asyncio.sleep(0.01)
            return os.getpid()

        def die(self, _call: GenerationRequest) -> None:
            os._exit(1)

    who = serve.deployment(
        num_replicas=2,
        max_ongoing_requests=50,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config={"request_router_class": PrefixRouter},
    )(Who)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    yield serve.run(who.bind(begun), name="routing", route_prefix=None)
    serve.shutdown()


def call(topic: str, turns: int = 1) -> GenerationRequest:
    """A conversation so far; each turn adds some blocks."""
    texts = [f"{topic} {number} " * BLOCK_CHARS for number in range(2 * turns - 1)]
    prompt = tuple(
        Turn("user" if number % 2 == 0 else "assistant", text) for number, text in enumerate(texts)
    )
    return GenerationRequest("id", (prompt,), ExactMode(), Sampling(), 1, 1)


def test_conversations_stay_with_their_replica(handle):
    """Turns of three conversations in turn; each finds its own prefix again."""
    seen: dict[str, set[int]] = {topic: set() for topic in TOPICS}
    for turn in range(1, TURNS + 1):
        for topic in TOPICS:
            seen[topic].add(handle.pid.remote(call(topic, turn)).result(timeout_s=30))
    assert [len(pids) for pids in seen.values()] == [1, 1, 1]


def test_load_spreads(handle, begun: Path):
    """One prefix that everybody shares: the replica that holds it is not left alone with it."""
    responses = [handle.held_pid.remote(call("shared")) for _ in range(4 * MAX_IMBALANCE)]
    while len(list(begun.iterdir())) < len(responses):
        time.sleep(0.01)
    (begun / "go").touch()
    counts = Counter(response.result(timeout_s=60) for response in responses)
    assert len(counts) == 2
    assert min(counts.values()) >= MAX_IMBALANCE


def test_what_is_no_call_is_routed_too(handle):
    """Guards a router that fails, and so hangs, on questions about readiness or tokens."""
    pids = {handle.pid.remote(question).result(timeout_s=30) for question in ["text"] * 20}
    assert len(pids) == 2


def test_the_death_of_the_preferred_replica_is_survived(handle):
    """Its conversations go to the other one and stay there."""
    home = handle.pid.remote(call("mourning")).result(timeout_s=30)
    with pytest.raises(Exception, match=r"died|crashed|dead"):
        handle.die.remote(call("mourning", 2)).result(timeout_s=30)
    pids = {handle.pid.remote(call("mourning", 3)).result(timeout_s=60) for _ in range(5)}
    assert len(pids) == 1
    assert home not in pids
