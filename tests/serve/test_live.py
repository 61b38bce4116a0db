"""What the page shows: rates of the last seconds, shares of the last minute, and their sums."""

import asyncio
from dataclasses import replace

import pytest
from fastapi.encoders import jsonable_encoder

from mars_ray.config.modes import ConfidenceMode, ExactMode, VerifiedMode
from mars_ray.config.serve import ServeJob
from mars_ray.decode.info import EngineInfo
from mars_ray.decode.stats import Snapshot, StepTotals
from mars_ray.serve.ingress.client import TtlCache
from mars_ray.serve.replica.stats import Live
from mars_ray.serve.status import Decided, ReplicaStatus, model_status

JOB = ServeJob(checkpoint="x")
INFO = EngineInfo("mars-ray", "float32", "cpu", "dense", None, 1, 4096, 64)
REPLICA = ReplicaStatus(
    "verified",
    0.5,
    "a@1",
    1,
    0,
    0.5,
    10.0,
    tokens=90,
    forwards=30,
    disagreed=9,
    ngram_tokens=20,
    engine=INFO,
    step_tokens=256,
    set_point=0.5,
    warning="too many",
)


def seen(set_point: float = 1.0) -> Snapshot:
    return Snapshot(
        running=2,
        waiting=1,
        cache_share=0.25,
        preemptions=0,
        prefix_queries=0,
        prefix_hits=0,
        windows=(),
        adapter=None,
        set_point=set_point,
        step_tokens=512,
        step_cost={},
        totals=StepTotals(),
        by_mode={},
        accepted_at={},
        info=INFO,
    )


def test_rates_follow_the_traffic():
    """Two tokens a tenth of a second are 20 a second; five quiet seconds later, none."""
    live = Live()
    for step in range(100):
        live.add(step / 10, tokens=2, forwards=1)
    assert live.tokens_per_second(10.0) == pytest.approx(20, rel=0.1)
    assert live.tokens_per_second(12.5) == pytest.approx(10, rel=0.2)
    assert live.tokens_per_second(15.1) == 0


def test_shares_are_of_the_last_minute():
    """Old steps are forgotten; a step without tokens, as at a deadline, is no forward."""
    live = Live()
    live.add(0.0, tokens=100, forwards=1, disagreed=100, ngram_tokens=90)
    live.add(50.0, tokens=6, forwards=1, disagreed=1, ngram_tokens=3)
    live.add(50.1, tokens=2, forwards=1, disagreed=0, ngram_tokens=1)
    live.add(50.2, tokens=0, forwards=0, disagreed=1, ngram_tokens=0)
    status = live.status(JOB, seen(), 61.0, in_default_mode=True)
    assert (status.tokens, status.forwards, status.disagreed) == (8, 2, 2)
    assert status.ngram_tokens == 4
    assert (status.running, status.waiting, status.cache_share) == (2, 1, 0.25)


@pytest.mark.parametrize(
    ("changes", "set_point", "threshold"),
    [
        ({}, 0.2, 1.0),
        ({"default_quality": "balanced"}, 1.0, 1.0),
        ({"default_quality": "balanced"}, 0.5, 0.5),
        ({"default_quality": "balanced"}, 0.1, 0.3),
        ({"default_mode": ConfidenceMode(threshold=0.9), "default_quality": "fast"}, 0.1, 0.1),
        ({"default_mode": ConfidenceMode(threshold=0.9)}, 0.1, 1.0),
        ({"default_mode": ConfidenceMode(threshold=0.9, measure="margin")}, 0.1, 0.9),
        ({"default_mode": ExactMode()}, 0.1, None),
        ({"default_mode": VerifiedMode(threshold=0.3)}, 0.1, 1.0),
    ],
)
def test_the_threshold_in_force_is_that_of_a_request_without_wishes(changes, set_point, threshold):
    """The set-point, but never below the default quality's floor, whatever the default mode names;
    modes whose threshold the service does not set keep their own."""
    job = JOB.model_copy(update=changes)
    status = Live().status(job, seen(set_point), 0.0, in_default_mode=True)
    assert status.threshold == threshold


def test_replicas_add_up():
    """Shares are of all tokens, not means of shares."""
    one = REPLICA
    two = ReplicaStatus(
        "verified",
        0.4,
        "b@2",
        2,
        3,
        0.0,
        0.5,
        tokens=10,
        forwards=10,
        disagreed=1,
        ngram_tokens=5,
        engine=INFO,
        step_tokens=240,
        set_point=0.3,
    )
    decided = Decided(9.0, 2, 0.5, 0.0, "2 replicas: why", 0.7, 1.5, 0.25)
    assert jsonable_encoder(model_status("m", [one, two], decided)) == {
        "id": "m",
        "replicas": 2,
        "running": 3,
        "waiting": 3,
        "kv_cache_usage": 0.25,
        "tokens_per_second": 10.5,
        "tokens_per_forward": 2.5,
        "disagreement": 0.1,
        "ngram_share": 0.25,
        "mode": "verified",
        "threshold": 0.4,
        "set_point": 0.3,
        "adapter": "a@1, b@2",
        "engine": {
            "engine": "mars-ray",
            "dtype": "float32",
            "device": "cpu",
            "attention": "dense",
            "instructions": None,
            "threads": 1,
            "cache_bytes": 4096,
            "cache_tokens": 64,
        },
        "step_tokens": 240,
        "warning": "too many",
        "policy": {
            "at_s": 9.0,
            "replicas": 2,
            "threshold": 0.5,
            "shed": 0.0,
            "reason": "2 replicas: why",
            "utilisation": 0.7,
            "floor_replicas": 1.5,
            "error_budget_spent": 0.25,
        },
    }
    nobody = model_status("m", [], None)
    assert (nobody["replicas"], nobody["threshold"], nobody["tokens_per_forward"]) == (
        0,
        None,
        None,
    )


def test_many_pages_ask_once():
    """However many wait for the answer; guards a service that is busy with its own status."""

    async def ask() -> int:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.01)
        return asked

    async def all_at_once() -> list[int]:
        recent = TtlCache(ask, fresh_s=60)
        first = await asyncio.gather(*(recent.get() for _ in range(10)))
        return [*first, await recent.get()]

    asked = 0
    assert asyncio.run(all_at_once()) == [1] * 11


@pytest.mark.parametrize(
    ("dtype", "kinds", "is_told"),
    [
        ("bfloat16", ["amx", "avx512f"], True),
        ("bfloat16", ["avx2", None], True),
        ("bfloat16", ["avx2", "avx512_bf16"], False),
        ("bfloat16", ["amx", "amx"], False),
        ("float32", ["amx", "avx2"], False),
    ],
)
def test_replicas_that_may_disagree_are_told(dtype, kinds, is_told):
    """Guards the promise that another replica gives the same answer."""
    infos = [replace(INFO, dtype=dtype, device="cpu", instructions=kind) for kind in kinds]
    replicas = [replace(REPLICA, engine=info, warning=None) for info in infos]
    warning = model_status("m", replicas, None)["warning"]
    assert bool(warning) == is_told
    if warning:
        assert "engine.cpu_instructions" in warning
