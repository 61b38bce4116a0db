"""Replicas and threshold of a service under load, on a real Ray Serve."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import httpx
import openai
import pytest
import ray
from ray import serve
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingContext

from mars_ray.autoscale.policy import Feedback, Fleet, State
from mars_ray.autoscale.service_model import Level, ServiceModel, Shape
from mars_ray.cluster.machine import free_port
from mars_ray.config.decode import EngineConfig
from mars_ray.config.scaling import ScalingConfig, Slo, ThresholdBounds
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.errors import ConfigError
from mars_ray.serve.autoscaler import Autoscaler
from mars_ray.serve.deploy import APP_NAME, start
from mars_ray.serve.threshold_actor import (
    end_controls,
    publish,
)

# Where a policy finds nothing that was learnt before.
NOTHING = Path("/nothing/here.json")
DEPLOYMENT = DeploymentID("Replica-tiny", "mars-ray")
# Lower thresholds pay: more tokens for the rows.
MODEL = ServiceModel(
    "tiny",
    ((1, 0.01), (100, 0.02)),
    (
        Level(1.0, 0.0, (Shape(4, 8.0, 1.2),)),
        Level(0.3, 0.5, (Shape(4, 8.0, 3.0),)),
    ),
    max_batch=8,
)


def context(series: dict, running: int, target: int) -> AutoscalingContext:
    replicas = sorted({replica for values in series.values() for replica in values}, key=str)
    return AutoscalingContext(
        deployment_id=DEPLOYMENT,
        deployment_name=DEPLOYMENT.name,
        app_name=DEPLOYMENT.app_name,
        current_num_replicas=running,
        target_num_replicas=target,
        running_replicas=replicas,
        total_num_requests=0,
        total_queued_requests=0,
        aggregated_metrics={},
        raw_metrics=series,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=None,
    )


def autoscaler(memory: Path = NOTHING) -> Autoscaler:
    config = ScalingConfig(max_replicas=4, threshold=ThresholdBounds(floor=0.3))
    return made(config, memory, measures_steps=True)


def made(config: ScalingConfig, memory: Path = NOTHING, *, measures_steps: bool) -> Autoscaler:
    engine = EngineConfig(max_batch=8)
    settings = (config.model_dump_json(), MODEL.to_json(), engine.model_dump_json())
    return Autoscaler("tiny", *settings, 1024, measures_steps, str(memory))


def test_without_reports_it_holds():
    """At the start and after a restart of the controller there are none."""
    assert autoscaler()(context({}, 0, 3)) == (3, {})


def test_a_failure_holds_too():
    """An exception here would stop every application of the cluster."""
    wrong = {"arrived": {ReplicaID("a", DEPLOYMENT): [TimeStampedValue(time.time(), 1.0)]}}
    broken = context(wrong, 1, 2)
    assert autoscaler()(broken) == (2, {})


def test_between_two_ticks_nothing_is_decided_anew(monkeypatch):
    """The controller asks ten times a second."""
    policy = autoscaler()
    monkeypatch.setattr(Autoscaler, "_publish", lambda *_: None)
    replica = ReplicaID("a", DEPLOYMENT)
    names = ("arrived", "running", "waiting")
    for look in range(2):
        now = time.time()
        series = {name: {replica: [TimeStampedValue(now, 5.0 * look)]} for name in names}
        series["step_cost:1"] = {replica: [TimeStampedValue(now, 0.02)]}
        series["step_cost:64"] = {replica: [TimeStampedValue(now, 0.03)]}
        policy(context(series, 1, 1))
        policy._next_s = 0.0
    decided = policy._state
    policy(context(series, 1, 1))
    policy._next_s = time.monotonic() + 60
    again = policy._state
    policy(context(series, 1, 1))
    assert policy._state is again is not decided
    assert policy._model.seconds_at == ((1, 0.02), (64, 0.03))
    # A row more takes 0.16 ms, so the most rows of a step of 90 ms.
    assert 400 < policy._model.step_rows < 500


def test_what_serve_wakes_stays_awake(monkeypatch):
    """Guards a replica that is stopped as soon as it is there, before it can tell of requests."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(Autoscaler, "_publish", lambda *_: None)
    config = ScalingConfig(scale_to_zero=True, idle_to_zero_s=60, max_replicas=4)
    policy = made(config, measures_steps=False)

    def idle(target: int, seconds: float) -> int:
        """What the policy says in the end of a replica that reports no requests."""
        for _ in range(int(seconds)):
            clock[0] += 1
            names = ("arrived", "running", "waiting")
            now = time.time() + clock[0] - 1000
            replica = ReplicaID("a", DEPLOYMENT)
            series = {name: {replica: [TimeStampedValue(now, 0.0)]} for name in names}
            target, _ = policy(context(series, 1, target))
        return target

    assert idle(3, 55) >= 1
    assert idle(1, 70) == 0
    assert policy(context({}, 0, 0)) == (0, {})
    # Serve goes to one for the first request, without asking.
    assert policy(context({}, 0, 1)) == (1, {}), "between two ticks"
    clock[0] += 1
    assert policy(context({}, 1, 1)) == (1, {}), "without reports"
    assert idle(1, 50) == 1
    assert idle(1, 70) == 0


def test_a_wall_clock_that_is_set_back_stops_nothing(monkeypatch):
    """Guards a policy that waits for the old time to come again."""
    wall, other = [1000.0], [0.0]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    monkeypatch.setattr(time, "monotonic", lambda: other[0])
    policy, states = autoscaler(), []
    for wall[0], other[0] in ((1000.0, 1.0), (400.0, 2.0), (400.1, 2.1)):
        policy(context({}, 1, 1))
        states.append(policy._state)
    assert states[0] is not states[1] is states[2]


def test_a_policy_that_is_made_anew_goes_on_from_what_was_learnt(tmp_path, monkeypatch, caplog):
    """As after a restart of Serve's controller, or of the service. It begins anew where the file
    cannot be read, and a disk that is full stops nothing."""
    monkeypatch.setattr(Autoscaler, "_publish", lambda *_: None)
    memory = tmp_path / "policies" / "tiny.json"
    first = autoscaler(memory)
    first(context({}, 1, 1))
    assert not memory.exists(), "a minute is not over"
    first._state = replace(first._state, feedback=Feedback(utilisation=0.55), fleet=Fleet(asked=7))
    first._next_s = first._keep_s = 0.0
    first(context({}, 1, 1))
    second = autoscaler(memory)
    assert second._state.feedback.utilisation == 0.55
    assert second._state.fleet == Fleet()

    memory.write_text('{"demand": "of another release"}')
    with caplog.at_level("WARNING", logger="ray.serve"):
        assert autoscaler(memory)._state == State()
        assert "begins with nothing learnt" in caplog.text
        blocked = autoscaler(memory / "not a directory")
        blocked._keep_s = 0.0
        assert blocked(context({}, 0, 3)) == (3, {})
    assert "cannot be kept" in caplog.text


@pytest.fixture
def service(ray_cluster, checkpoint, tmp_path, request) -> Iterator[openai.OpenAI]:
    """Of one model; `request.param` has more of what the operator wants."""
    model = tmp_path / "model.json"
    MODEL.save(model)
    wanted = dict(getattr(request, "param", {}))
    waiting = wanted.pop("waiting_requests", 500)
    if utilisation := wanted.pop("learnt", None):
        memory = tmp_path / "policies" / "Replica-tiny.json"
        memory.parent.mkdir()
        memory.write_text(State(feedback=Feedback(utilisation=utilisation)).to_json())
    job = ServeJob(
        checkpoint=str(checkpoint),
        port=free_port(),
        model_name="tiny",
        model_cache=str(tmp_path),
        cpus_per_replica=0.5,
        default_quality="balanced",
        replicas="auto",
        service_model=str(model),
        scaling=ScalingConfig(
            slo=Slo(ttft_s=0.5, time_per_token_s=0.05),
            max_replicas=2,
            cold_start_s=10,
            **wanted,
        ),
        engine=EngineConfig(max_batch=8, max_context=1000, device="cpu", threads=1),
        limits=Limits(new_tokens=400, waiting_requests=waiting),
    )
    url = start(job)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=50) as client:
        yield client
    serve.shutdown()
    end_controls()


def replicas() -> int:
    states = serve.status().applications[APP_NAME].deployments["Replica-tiny"].replica_states
    return sum(count for state, count in states.items() if state != "STOPPING")


def wait_for(count: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while replicas() != count:
        assert time.monotonic() < deadline, f"{replicas()} replicas instead of {count}"
        time.sleep(0.2)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize(
    "service", [{"scale_to_zero": True, "idle_to_zero_s": 5}], indirect=True, ids=["to zero"]
)
def test_a_service_at_zero_wakes_for_a_request_and_stays_awake(service):
    """The first request waits for a replica; the second finds it."""

    def ask() -> float:
        begin = time.monotonic()
        service.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=5
        )
        return time.monotonic() - begin

    wait_for(0, 60)
    # Whoever watches over the service does not wake it.
    once = service.with_options(max_retries=0)
    for _ in range(15):
        assert once.get("/../readyz", cast_to=dict) == {"status": "ready"}
        assert once.get("/mars/status", cast_to=dict)["data"][0]["replicas"] == 0
        time.sleep(0.2)
    assert replicas() == 0
    ask()
    time.sleep(2)
    assert ask() < 3
    assert replicas() == 1
    wait_for(0, 60)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize(
    "service",
    [{"scale_to_zero": True, "idle_to_zero_s": 5, "waiting_requests": 10}],
    indirect=True,
    ids=["to zero"],
)
def test_a_fleet_shrinks_when_its_long_streams_are_over(service):
    """Guards counts that never come down again (ray#61551): of streams that came to their ends, of
    those whose readers left, and of requests that were refused, some of them by Serve itself."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "count"}], "stream": True}
    body |= {"max_tokens": 200, "temperature": 0}
    endings: list[str] = []

    async def ask_on(client: httpx.AsyncClient, leaves: bool, enough: asyncio.Event) -> None:
        while not enough.is_set():
            async with client.stream("POST", "chat/completions", json=body) as reply:
                if reply.status_code == 429:
                    endings.append("refused")
                    await asyncio.sleep(0.5)
                    continue
                assert reply.status_code == 200
                lines = reply.aiter_lines()
                begun = [await anext(lines) for _ in range(2)]
                endings.append("left" if leaves else [*begun, *[x async for x in lines if x]][-1])

    async def two_replicas(enough: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(150):
                while await asyncio.to_thread(replicas) < 2:
                    await asyncio.sleep(0.2)
        finally:
            enough.set()

    async def load() -> None:
        enough, limits = asyncio.Event(), httpx.Limits(max_connections=None)
        url = str(service.base_url)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            # More than the places of one replica, those for refusals among them.
            asking = [ask_on(client, number % 3 == 0, enough) for number in range(120)]
            await asyncio.gather(two_replicas(enough), *asking)

    asyncio.run(load())
    assert set(endings) == {"data: [DONE]", "left", "refused"}
    wait_for(0, 90)
    for _ in range(25):
        assert replicas() == 0, "what is left of the load wakes it"
        time.sleep(0.2)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("service", [{"learnt": 0.51}], indirect=True, ids=["learnt"])
def test_a_burst_lowers_the_threshold_and_brings_a_replica(service):
    """The threshold rises again afterwards; the replica stays, for the record remembers the burst.
    Every request is answered, some after a refusal that says when to try again, and none below the
    threshold it has pinned. The policy goes on from the file that it finds.

    The burst goes on until it has had its effects, so a slower machine is asked less in that time.
    """
    enough = Event()
    answers: list[tuple[bool, float]] = []

    def ask_on(number: int) -> None:
        pinned = number % 5 == 0
        while not enough.is_set():
            reply = service.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": f"count from {number}"}],
                max_tokens=100,
                temperature=0,
                extra_body={"threshold": 1.0} if pinned else {},
            )
            assert reply.usage is not None
            answers.append((pinned, reply.usage.model_dump()["mars"]["threshold"]))

    def control():
        return ray.get_actor("control:tiny", "mars-ray")

    def in_force() -> float:
        return ray.get(control().wait.remote(None)).set_point.threshold

    def used(*, pinned: bool) -> set[float]:
        return {threshold for was_pinned, threshold in list(answers) if was_pinned == pinned}

    assert (replicas(), in_force()) == (1, 1.0)
    lowest, most = 1.0, 1
    with ThreadPoolExecutor(100) as pool:
        asked = [pool.submit(ask_on, number) for number in range(100)]
        deadline = time.monotonic() + 120
        try:
            while lowest == 1 or most == 1 or used(pinned=False) <= {1.0} or not used(pinned=True):
                assert time.monotonic() < deadline, (lowest, most, answers)
                lowest, most = min(lowest, in_force()), max(most, replicas())
                time.sleep(0.2)
        finally:
            enough.set()
        for future in asked:
            future.result()
    assert most == 2
    with pytest.raises(ConfigError, match="policy's to choose"):
        publish("tiny", 0.5)
    (status,) = httpx.get(f"{service.base_url}mars/status").json()["data"]
    assert "replicas" in status["policy"]["reason"]
    assert status["policy"]["utilisation"] < 0.6, "the policy goes on from what it was given"
    reasons = [entry.reason for entry in ray.get(control().history.remote())]
    assert any("2 replicas" in reason for reason in reasons)
    assert used(pinned=True) == {1.0}
    deadline = time.monotonic() + 90
    while in_force() != 1.0:
        assert time.monotonic() < deadline, in_force()
        time.sleep(0.5)
    assert replicas() == 2
