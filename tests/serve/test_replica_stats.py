"""What the metrics are told of single answers."""

import asyncio
import time
from dataclasses import replace

import pytest
from serve.asking import load_server

from mars_ray.autoscale.sample import PINNED, Collector, ReplicaCounts, Report
from mars_ray.autoscale.threshold import Rung, SetPoint
from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ConfidenceMode, Mode, VerifiedMode
from mars_ray.config.scaling import ScalingConfig, Slo
from mars_ray.config.serve import ServeJob
from mars_ray.core.thresholds import Budget, Elastic
from mars_ray.decode.request import TokenEvent
from mars_ray.serve.protocol import GenerationRequest
from mars_ray.serve.replica.stats import AnswerStats, ReplicaCounters


@pytest.fixture(scope="module")
def kept() -> list[AnswerStats]:
    """All answers that an observer was told of."""
    return []


@pytest.fixture(scope="module")
def engine(job, kept):
    engine = load_server(job, kept.append)
    engine.start()
    yield engine
    engine.stop()


@pytest.mark.parametrize(
    ("mode", "quality", "point", "degraded"),
    [
        (VerifiedMode(), Elastic(0.1), 1.0, False),
        (VerifiedMode(), Elastic(0.1), 0.3, True),
        (VerifiedMode(), Elastic(1.0), 0.3, False),  # has pinned the best
        (VerifiedMode(), Budget(0.1), 0.3, False),  # as it asked for, whatever the set-point
        (VerifiedMode(), None, 0.3, False),
        (ConfidenceMode(), Elastic(0.1), 1.0, False),
        (ConfidenceMode(), Elastic(0.1), 0.3, True),
        (ConfidenceMode(), Elastic(1.0), 0.3, False),
        (ConfidenceMode(), None, 0.3, False),
    ],
)
def test_an_answer_is_degraded_when_the_set_point_was_lowered_for_it(
    engine, kept, mode, quality, point, degraded
):
    """Operators are alerted by it, so neither pinned requests nor quiet times may count."""

    async def ask() -> None:
        await engine.follow(SetPoint(point))
        prompt = ("one two three",)
        call = GenerationRequest("a", prompt, mode, Sampling(), 12, 100, quality=quality)
        async for _ in engine.generate(call):
            pass

    asyncio.run(ask())
    assert kept[-1].degraded is degraded
    assert kept[-1].completion_tokens == 12


def test_an_engine_with_a_long_queue_lowers_its_threshold_by_itself(job, kept):
    """The fast loop: no policy has said so, and without rungs it is the policy's again."""
    engine = load_server(job, kept.append)
    engine.start()
    rungs = (Rung(1.0, 2.0, 1.0, 0.0), Rung(0.3, 4.0, 1.0, 1.0))

    async def ask(number: int) -> None:
        call = GenerationRequest(str(number), ("one two",), VerifiedMode(), Sampling(), 12, 100)
        call = replace(call, quality=Elastic(0.1), quality_class="default")
        async for _ in engine.generate(call):
            await engine.steer()

    async def ask_for_many() -> None:
        await engine.follow(SetPoint(1.0, 0.0, rungs))
        before = (await engine.snapshot()).set_point
        await asyncio.gather(*map(ask, range(12)))
        during = (await engine.snapshot()).set_point
        await engine.follow(SetPoint(1.0))
        assert (before, during, (await engine.snapshot()).set_point) == (1.0, 0.3, 1.0)

    asyncio.run(ask_for_many())
    engine.stop()
    assert any(answer.degraded for answer in kept[-12:])


def test_all_tokens_of_an_interval_are_counted(engine, kept):
    """Guards steps that are read one by one, as text may end between them, and counted once."""

    async def ask() -> None:
        call = GenerationRequest(
            "b", ("one two three",), VerifiedMode(), Sampling(), 40, 100, stop=("\0",)
        )
        async for _ in engine.generate(call):
            pass

    asyncio.run(ask())
    seen = kept[-1]
    assert (seen.completion_tokens, seen.ending) == (40, "length")
    assert seen.forwards <= 40


def test_the_policy_hears_what_happened(engine):
    """Over the names and numbers that Ray Serve carries."""

    async def counts() -> ReplicaCounts:
        return ReplicaCounts.from_metrics(await engine.report())

    async def ask() -> tuple[ReplicaCounts, ReplicaCounts]:
        before = await counts()
        prompt = ("one two three",)
        call = GenerationRequest("c", prompt, VerifiedMode(), Sampling(), 12, 100, n=2)
        async for _ in engine.generate(replace(call, quality_class="fast")):
            pass
        return before, await counts()

    before, after = asyncio.run(ask())
    grown = after.since(before)
    assert (grown.arrived, grown.finished, grown.output_tokens) == (2, 2, 24)
    assert grown.quality_class["fast"] == 2
    assert grown.steps >= grown.measured_forwards / 2 > 0
    assert grown.tokens_at[0.0] >= grown.tokens_at[1.0] >= grown.measured_forwards
    assert (after.running, after.waiting) == (0, 0)
    assert after.step_cost.keys() == before.step_cost.keys()


@pytest.mark.parametrize("point", [1.0, 0.3])
def test_the_policy_hears_of_thresholds_in_the_mode_of_the_service(job, kept, point):
    """In `confidence` only below 1: plain decoding has no masks that could tell anything."""
    engine = load_server(job.model_copy(update={"default_mode": ConfidenceMode()}), kept.append)
    engine.start()

    async def counts_of(mode: Mode) -> ReplicaCounts:
        prompt = ("one two three",)
        call = GenerationRequest("d", prompt, mode, Sampling(), 12, 100, quality=Elastic(0.0))
        async for _ in engine.generate(call):
            pass
        return ReplicaCounts.from_metrics(await engine.report())

    async def ask() -> tuple[ReplicaCounts, ReplicaCounts]:
        await engine.follow(SetPoint(point))
        return await counts_of(VerifiedMode()), await counts_of(ConfidenceMode())

    other, own = asyncio.run(ask())
    engine.stop()
    assert other.tokens_at == {}
    assert bool(own.tokens_at) == (point < 1)
    assert own.measured_forwards == (kept[-1].forwards if point < 1 else 0)


SLO = Slo(ttft_s=2.0, time_per_token_s=0.1)


@pytest.mark.parametrize(
    ("first_token_s", "total_s", "tokens", "ending", "expected"),
    [
        (1.5, 2.2, 11, "stop", (1, 0, 0)),
        (1.6, 2.2, 11, "stop", (1, 1, 0)),
        (1.5, 2.4, 11, "stop", (1, 1, 0)),  # 90 ms a token
        (0.1, 1.2, 11, "stop", (1, 1, 1)),  # 110 ms
        (1.6, 2.8, 11, "stop", (1, 1, 1)),  # slow by one, then late by the other
        (2.1, 9.0, 11, "stop", (1, 1, 1)),  # late by both
        (0.1, 9.0, 1, "stop", (1, 0, 0)),  # there is no other token
        (0.1, 9.0, 3, "abort", (1, 0, 0)),
        (2.1, 9.0, 3, "abort", (1, 1, 1)),
        (None, 9.0, 0, "abort", (0, 0, 0)),
        (None, 9.0, 0, "deadline", (0, 1, 1)),
        (None, 1.0, 0, "deadline", (0, 0, 0)),
    ],
)
def test_an_answer_is_slow_and_late_once(
    monkeypatch, first_token_s, total_s, tokens, ending, expected
):
    """By its first token or its mean time per token. Guards a policy that learns from counts which
    grow twice for one request, or from clients that left."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    counters = ReplicaCounters(ServeJob(checkpoint="x", scaling=ScalingConfig(slo=SLO)))
    seen = AnswerStats("exact", 5, "fast", completion_tokens=tokens, begun_s=0.0, last_s=0.0)
    if first_token_s is not None:
        now[0] = first_token_s
        call = GenerationRequest("a", ("one",), VerifiedMode(), Sampling(), 12, 100)
        counters.step(call, seen, TokenEvent("a", (1,), 1, None), 1)
    now[0] = total_s
    counters.ended(seen, ending)
    assert counters.finished == 1
    found = counters.started["fast"], counters.slow["fast"], counters.late["fast"]
    assert found == expected


def test_the_policy_hears_of_late_answers_by_class(job):
    """From the engine's steps to the rates of a sample: reports four seconds apart."""
    strict = job.model_copy(update={"scaling": ScalingConfig(slo=Slo(ttft_s=1e-6))})
    engine = load_server(strict)
    engine.start()
    collector = Collector()

    async def ask(name: str | None, choices: int) -> None:
        prompt = ("one two three",)
        call = GenerationRequest("d", prompt, VerifiedMode(), Sampling(), 4, 100, n=choices)
        async for _ in engine.generate(replace(call, quality_class=name)):
            pass

    async def sampled() -> list:
        samples = []
        for at_s, name, choices in ((0.0, "fast", 1), (4.0, "fast", 2), (8.0, None, 1)):
            await ask(name, choices)
            report = Report(at_s, ReplicaCounts.from_metrics(await engine.report()))
            samples.append(collector.sample({"a": report}, 1, 1, at_s, at_s))
        return samples

    _, second, third = asyncio.run(sampled())
    engine.stop()
    assert second.started == second.slow == second.late == {"fast": 0.5}
    assert third.started == third.late == {"fast": 0.0, PINNED: 0.25}


def test_what_the_engine_refuses_is_no_failure(engine, kept):
    """Operators are woken by failures. Guards alerts for prompts that are too long."""

    async def ask() -> None:
        call = GenerationRequest("long", ("one " * 5000,), VerifiedMode(), Sampling(), 12, 100)
        async for _ in engine.generate(call):
            pass

    finished = engine._counters.finished
    asyncio.run(ask())
    assert kept[-1].ending == "refused"
    assert engine._counters.finished == finished
