"""The set-point travels through an actor."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import ray
from ray.exceptions import RaySystemError
from ray.util import list_named_actors

from mars_ray.autoscale.threshold import SetPoint
from mars_ray.config.serve import ServeJob
from mars_ray.serve import threshold_actor
from mars_ray.serve.status import Decided
from mars_ray.serve.threshold_actor import (
    News,
    Setting,
    Swap,
    ThresholdActor,
    control_of,
    end_controls,
    follow,
)

FIXED = Setting(1.0, 0.9, is_auto=False)


@pytest.mark.ray
def test_everybody_learns_every_set_point(ray_cluster):
    """Guards a replica that keeps an old threshold: one that comes late, and one whose actor was
    lost, both know the newest."""
    seen: list[SetPoint] = []

    async def apply(news: News) -> None:
        seen.append(news.set_point)

    async def until(threshold: float) -> float:
        begin = time.monotonic()
        while not seen or seen[-1].threshold != threshold:
            assert time.monotonic() - begin < 20
            await asyncio.sleep(0.001)
        return time.monotonic() - begin

    async def scenario() -> None:
        following = asyncio.create_task(follow("nobody", FIXED, apply))
        await until(0.9)
        actor = control_of("nobody", FIXED)
        await actor.publish.remote(SetPoint(0.5, 0.25))
        await until(0.5)
        assert seen[-1].shed == 0.25
        changes = len(seen)
        await actor.publish.remote(SetPoint(0.5, 0.25))
        await asyncio.sleep(0.2)
        assert len(seen) == changes
        # It comes back with the job's own set-point.
        ray.kill(actor, no_restart=False)
        await until(0.9)
        await control_of("nobody", FIXED).publish.remote(SetPoint(0.4))
        await until(0.4)
        following.cancel()

    asyncio.run(scenario())
    ray.get(control_of("somebody", FIXED).history.remote())

    def names() -> set[str]:
        return {each["name"] for each in list_named_actors(all_namespaces=True)}

    end_controls({"nobody", "never"})
    wait_until(lambda: "control:nobody" not in names())
    assert "control:somebody" in names()
    end_controls()
    wait_until(lambda: "control:somebody" not in names())


def test_any_trouble_of_the_cluster_is_over_some_time(monkeypatch):
    """Guards replicas that shed load for ever since the head did not answer once."""
    asked = []

    def away(model: str, setting: Setting) -> None:
        asked.append(model)
        raise RaySystemError("the head is away")

    async def scenario() -> None:
        following = asyncio.create_task(follow("nobody", FIXED, never))
        while len(asked) < 2:
            assert not following.done()
            await asyncio.sleep(0.01)
        following.cancel()

    async def never(news: News) -> None:
        raise AssertionError(news)

    monkeypatch.setattr(threshold_actor, "control_of", away)
    monkeypatch.setattr(threshold_actor, "_RETRY_S", 0.01)
    asyncio.run(scenario())


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_wait_without_news_leaves_nothing_behind(monkeypatch):
    """Guards a task for every wait of every replica: two a minute, for as long as they live."""
    monkeypatch.setattr(threshold_actor, "_WAIT_S", 0.01)

    async def scenario() -> None:
        point = ThresholdActor(FIXED)
        first = await point.wait(None)
        for _ in range(5):
            assert await point.wait(first.version) == first
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


async def told(control: ThresholdActor) -> tuple[float, float]:
    set_point = (await control.wait(None)).set_point
    return set_point.threshold, set_point.shed


def test_what_a_policy_has_said_ends_with_it():
    """Guards a service with a fixed number of replicas that goes on refusing, as a policy which is
    gone has said last, or says while it goes; and a set-point of before in the place of the last.
    """
    full = Decided(9.0, 4, 0.1, 0.5, "full", 0.7, 2.5, 0.0)

    async def scenario() -> None:
        control = ThresholdActor(Setting(0.0, 1.0, is_auto=True))
        assert await control.is_auto()
        await control.publish(SetPoint(0.1, 0.5), full)
        await control.publish(SetPoint(1.0, 0.0), replace(full, at_s=8.0))
        assert len(await control.history()) == 1, "one of before, which comes late"
        assert await told(control) == (0.1, 0.5)
        await control.publish(SetPoint(0.2, 0.5), replace(full, at_s=9.0 - 3600))
        assert await told(control) == (0.2, 0.5), "the controller's clock went back"
        await control.publish(SetPoint(0.1, 0.5), full)
        await control.adopt(Setting(1.0, 1.0, is_auto=True))
        assert await told(control) == (0.1, 0.5)
        await control.adopt(Setting(2.0, 1.0, is_auto=False))
        await control.publish(SetPoint(0.1, 0.5), full)
        assert await told(control) == (1.0, 0.0)
        assert await control.history() == []
        assert not await control.is_auto()

    asyncio.run(scenario())


def test_the_newest_job_says_the_set_point():
    """What an operator has said stays in force until a job says something new; a replica of an
    older job that comes late says nothing new."""

    async def scenario() -> None:
        control = ThresholdActor(FIXED)
        await control.publish(SetPoint(0.7))
        await control.adopt(Setting(2.0, FIXED.set_point, is_auto=False))
        assert (await told(control))[0] == 0.7
        await control.adopt(Setting(3.0, 0.5, is_auto=False))
        await control.adopt(FIXED)
        assert (await told(control))[0] == 0.5

    asyncio.run(scenario())


def test_a_swap_is_for_the_replicas_of_its_application():
    """Guards an adapter for another checkpoint in replicas of an older or a newer job; the
    set-point changes beside it and neither takes the other back."""
    one, two = Swap(1.0, 5.0, "/a", "a@1"), Swap(1.0, 6.0, None, None)

    async def scenario() -> None:
        control = ThresholdActor(FIXED)
        assert await control.swapped(1.0) is None
        await control.swap(one)
        await control.publish(SetPoint(0.7))
        point = await control.wait(None)
        assert (point.set_point.threshold, point.swap) == (0.7, one)
        assert await control.swapped(1.0) == one
        assert await control.swapped(2.0) is None
        await control.swap(two)
        assert (await control.wait(point.version)).swap == two
        # From a replica that has not heard of the last one yet.
        await control.adopt(FIXED, one)
        assert await control.swapped(1.0) == two

    asyncio.run(scenario())


@pytest.mark.ray
def test_a_swap_outlives_its_actor(ray_cluster):
    """Guards replicas that start with the job's adapter after the actor's node was lost: those that
    live tell the next actor."""
    swap = Swap(FIXED.at_s, 5.0, "/a", "a@1")
    seen: list[News] = []

    async def apply(news: News) -> None:
        seen.append(news)

    async def until(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    def known() -> Swap | None:
        return next((point.swap for point in reversed(seen) if point.swap), None)

    async def scenario() -> None:
        following = asyncio.create_task(follow("swapped", FIXED, apply, known))
        await until(lambda: bool(seen))
        actor = control_of("swapped", FIXED)
        await actor.swap.remote(swap)
        await until(lambda: known() == swap)
        ray.kill(actor, no_restart=False)
        count = len(seen)
        await until(lambda: len(seen) > count)
        assert await control_of("swapped", FIXED).swapped.remote(FIXED.at_s) == swap
        following.cancel()

    asyncio.run(scenario())
    end_controls({"swapped"})


def test_the_lowest_threshold_of_those_who_name_nothing_is_known():
    """Guards a command that seems to have lowered what it has not."""
    for changes, floor in (({}, 1.0), ({"default_quality": "balanced"}, 0.3)):
        job = ServeJob.model_validate({"checkpoint": "m"} | changes)
        control = ThresholdActor(Setting.of(job, 0.0))
        assert asyncio.run(control.floor()) == floor
