"""The set-point on its way to the replicas: a small named actor on which they wait.

Whoever decides publishes and goes on; a replica has the news some milliseconds later, and a new one
asks for it first. The actor outlives the process that made it, and is made anew with the job's own
set-point if it is lost.
"""

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Container, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util import list_named_actors

from mars_ray.errors import ConfigError
from mars_ray.scaling.ladder import Rung

_NAMESPACE = "mars-ray"
# A wait that ends without news: so that a caller which is gone is not waited for in vain.
_WAIT_S = 30.0
_RETRY_S = 0.5
_KEPT = 4096  # decisions, half an hour of them
# A policy that has decided nothing for so long is not in charge any more.
_LATELY_S = 60.0


@dataclass(frozen=True, slots=True)
class SetPoint:
    """What is in force for requests that leave it open."""

    version: int
    threshold: float
    shed: float = 0.0  # share of the new ones among them to refuse
    rungs: tuple[Rung, ...] = ()  # that a replica may choose from by itself


@dataclass(frozen=True, slots=True)
class Entry:
    """A decision as it was made, by the clock of the wall."""

    at_s: float
    replicas: int
    threshold: float
    shed: float
    reason: str


class Control:
    """The actor. Versions count changes; another actor begins elsewhere."""

    def __init__(self, threshold: float) -> None:
        self._point = SetPoint(secrets.randbits(48), threshold)
        self._changed = asyncio.Event()
        self._history: deque[Entry] = deque(maxlen=_KEPT)

    async def record(self, entry: Entry, rungs: tuple[Rung, ...]) -> None:
        """A decision of the autoscaling policy, and its set-point is published."""
        self._history.append(entry)
        await self.publish(entry.threshold, entry.shed, rungs)

    async def history(self) -> list[Entry]:
        """The last decisions, oldest first."""
        return list(self._history)

    async def publish(
        self, threshold: float, shed: float = 0.0, rungs: tuple[Rung, ...] = ()
    ) -> None:
        """The same as before is no change."""
        point = SetPoint(self._point.version + 1, threshold, shed, rungs)
        if replace(point, version=self._point.version) != self._point:
            self._point = point
            self._changed.set()
            self._changed = asyncio.Event()

    async def release(self, threshold: float) -> None:
        """If a policy was in charge, what it has said last holds no longer."""
        if self._history:
            self._history.clear()
            await self.publish(threshold)

    async def wait(self, version: int | None) -> SetPoint:
        """The point, once it is another one than that of the version; None: at once."""
        changed = self._changed
        if self._point.version == version:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_S):
                    await changed.wait()
        return self._point


def control_of(model: str, threshold: float) -> Any:
    """The handle of a model's actor, made with this set-point if there is none."""
    options: dict[str, Any] = {
        "name": f"control:{model}",
        "namespace": _NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
    }
    return ray.remote(Control).options(**options).remote(threshold)


def publish(model: str, threshold: float) -> None:
    """Has the model's replicas follow.

    Raises ConfigError if no service has this model, or the policy chooses its threshold.
    """
    try:
        control = ray.get_actor(f"control:{model}", namespace=_NAMESPACE)
    except ValueError as error:
        raise ConfigError(f"no service on this cluster has a model {model!r}") from error
    decisions = ray.get(control.history.remote())
    if decisions and time.time() - decisions[-1].at_s < _LATELY_S:
        raise ConfigError(
            f"the threshold of {model!r} is the autoscaling policy's to choose: change "
            "`scaling.threshold` in the job and tell the service with `mars-ray update`, "
            "or give it a fixed number of `replicas`, and a minute later say this again"
        )
    ray.get(control.publish.remote(threshold))


def release(model: str, threshold: float) -> None:
    """No policy is in charge of the model any more: at rest is the job's own set-point again.

    What an operator has said stays in force.
    """
    ray.get(control_of(model, threshold).release.remote(threshold))


def end_controls(models: Container[str] | None = None) -> None:
    """Of models that are served no more; without names of all, where Serve has ended."""
    actors: Any = list_named_actors(all_namespaces=True)  # Ray's annotation: of the other argument
    for actor in actors:
        prefix, _, model = actor["name"].partition(":")
        is_ours = (prefix, actor["namespace"]) == ("control", _NAMESPACE)
        if is_ours and (models is None or model in models):
            # It may have ended meanwhile.
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(**actor))


async def follow(
    model: str, threshold: float, apply: Callable[[SetPoint], Coroutine[Any, Any, None]]
) -> None:
    """Applies every set-point, until cancelled. `threshold` is the job's own."""
    version = None
    while True:
        try:
            control = control_of(model, threshold)
            while True:
                point = await control.wait.remote(version)
                version = point.version
                await apply(point)
        except RayActorError:
            # Another one counts its versions from the start.
            version = None
            await asyncio.sleep(_RETRY_S)
