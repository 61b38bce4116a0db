"""The set-point travels through a real actor."""

import asyncio
import time

import pytest
import ray

from mars_ray.serve.control import SetPoint, control_of, end_control, follow

pytestmark = pytest.mark.ray


def test_everybody_learns_every_set_point(ray_cluster):
    """Guards a replica that keeps an old threshold: one that comes late, and one whose actor was
    lost, both know the newest."""
    seen: list[SetPoint] = []

    async def apply(point: SetPoint) -> None:
        seen.append(point)

    async def until(threshold: float) -> float:
        begin = time.monotonic()
        while not seen or seen[-1].threshold != threshold:
            assert time.monotonic() - begin < 20
            await asyncio.sleep(0.001)
        return time.monotonic() - begin

    async def scenario() -> None:
        following = asyncio.create_task(follow("nobody", 0.9, apply))
        await until(0.9)
        control = control_of("nobody", 0.9)
        await control.publish.remote(0.5, 0.25)
        await until(0.5)
        assert seen[-1].shed == 0.25
        changes = len(seen)
        await control.publish.remote(0.5, 0.25)
        await asyncio.sleep(0.2)
        assert len(seen) == changes
        # It comes back with the job's own set-point.
        ray.kill(control, no_restart=False)
        await until(0.9)
        await control_of("nobody", 0.9).publish.remote(0.4, 0.0)
        await until(0.4)
        following.cancel()

    asyncio.run(scenario())
    end_control("nobody")
    end_control("nobody")
