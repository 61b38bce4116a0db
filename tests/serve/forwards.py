"""Functions that change every forward of a replica's process from the outside.

What is sent to a replica is not among its modules, so it is sent by value.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from mars_ray.decode import engine

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def run_in(replica: str, work: Callable[[Any], None]) -> None:
    """Call a function in a replica's process."""
    ray.get(ray.get_actor(replica, "serve").__ray_call__.remote(work))


def slow_down(pause_s: float, path: Path | None = None) -> Callable[[Any], None]:
    """Make each forward longer; with a path, while this file is there."""

    def patch(_actor: Any) -> None:
        forward = engine.forward

        def slow_forward(*args: Any) -> Any:
            if path is None or path.exists():
                time.sleep(pause_s)
            return forward(*args)

        engine.forward = slow_forward

    return patch


def hold(path: Path) -> Callable[[Any], None]:
    """Let no forward begin while this file is there."""

    def patch(_actor: Any) -> None:
        forward = engine.forward

        def held_forward(*args: Any) -> Any:
            while path.exists():
                time.sleep(0.01)
            return forward(*args)

        engine.forward = held_forward

    return patch


def break_down() -> None:
    """Let this process have no device any more."""

    def gone(*args: object) -> None:
        raise RuntimeError("the device is gone")

    engine.forward = gone
