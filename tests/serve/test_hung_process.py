"""A replica's process that does not react ends itself, with or without Python's help."""

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, ctypes, sys, time
from mars_ray.errors import EngineError
from mars_ray.serve.replica.deployment import Replica

class Engine:
    is_stuck = False

    def check_health(self):
        if self.is_stuck:
            raise EngineError("the engine has work but has not stepped for 1 s")

async def hang(how):
    replica = object.__new__(Replica)
    replica._engine = Engine()
    watching = asyncio.create_task(replica._watchdog(1.0))
    await asyncio.sleep(2)
    print("healthy for longer than the limit", flush=True)
    if how == "engine":
        replica._engine.is_stuck = True
        await asyncio.sleep(60)
    if how == "loop":
        time.sleep(60)
    if how == "interpreter":
        ctypes.PyDLL(None).sleep(60)  # nor does it give the GIL away

asyncio.run(hang(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["engine", *(pytest.param(how, marks=pytest.mark.long) for how in ("loop", "interpreter"))],
)
def test_a_process_that_hangs_ends_and_says_where(how):
    """Guards a replica that Serve takes for busy, and then lets drain what it cannot finish."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=50
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == "healthy for longer than the limit\n"
    assert "most recent call first" in ended.stderr
    if how == "engine":
        assert "has not stepped" in ended.stderr
    else:
        assert "Timeout (0:00:01)!" in ended.stderr
        assert "in hang" in ended.stderr
