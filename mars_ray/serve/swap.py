"""Swaps the draft adapter in all replicas of a running service, or in none.

1. Every replica fetches and reads it, and checks it against the model (`replica/adapters.py`).
   If one cannot, the swap ends there, and nothing has changed.
2. The model's actor announces that it is in force (`threshold_actor.py`).
3. Every replica takes it between two steps; one that starts later asks the actor first.

No request fails, and no process is restarted.
"""

import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError

from mars_ray.config.serve import ServeJob
from mars_ray.errors import EngineError, ModelError
from mars_ray.serve.protocol import Prepared
from mars_ray.serve.status import ReplicaStatus
from mars_ray.serve.threshold_actor import Setting, Swap, control_of

# An adapter has a few megabytes, but a store may be slow.
_PREPARE_S = 120.0
_TAKE_S = 30.0
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Running:
    """A service as it was deployed."""

    job: ServeJob
    built_s: float


def swap_adapters(job: ServeJob, running: Running, ingress: Any) -> bool:
    """Puts the job in force if only its adapters are new; returns whether that is so.

    `ingress` is the handle of the running service's ingress. Raises ModelError if a replica cannot
    load an adapter, and then nothing has changed; EngineError if replicas do not answer in time.
    """
    if _without_adapters(job) != _without_adapters(running.job):
        return False
    models = job.each()
    prepared = {name: _prepared(ingress, model) for name, model in models.items()}
    new = {
        name: model
        for name, model in models.items()
        if not _is_in_force(ingress, model, running, prepared[name])
    }
    for name, model in new.items():
        setting = Setting.of(model, running.built_s)
        place = model.engine.draft_adapter
        swap = Swap(running.built_s, time.time(), place, prepared[name])
        ray.get(control_of(name, setting).swap.remote(swap))
    for name, model in new.items():
        _wait_until_taken(ingress, model, prepared[name])
    return bool(new)


def _without_adapters(job: ServeJob) -> list[dict[str, Any]]:
    tables = [model.model_dump() for model in job.each().values()]
    for table in tables:
        table["engine"]["draft_adapter"] = None
    return tables


def _told(ingress: Any, name: str, method: str, *args: Any, limit_s: float) -> list[Any]:
    """The replies of the living replicas. Raises EngineError unless all answer in time."""
    try:
        said = ingress.tell_all.remote(name, method, *args).result(timeout_s=limit_s)
    except TimeoutError as error:
        raise EngineError(
            f"the replicas of {name!r} have not answered within {limit_s:g} s; they go on as they "
            "were"
        ) from error
    for each in said:
        if isinstance(each, Exception) and not isinstance(each, RayActorError):
            raise EngineError(f"a replica of {name!r} failed: {each}") from each
    return [each for each in said if not isinstance(each, Exception)]


def _prepared(ingress: Any, model: ServeJob) -> str | None:
    """Makes the adapter ready in every replica; returns its name. Raises ModelError."""
    place = model.engine.draft_adapter
    said: list[Prepared] = _told(ingress, model.name, "prepare_adapter", place, limit_s=_PREPARE_S)
    for each in said:
        if each.error:
            raise ModelError(f"{each.error}; the service goes on as it was")
    names = {each.name for each in said}
    if len(names) > 1:
        raise ModelError(
            f"the replicas of {model.name!r} find different files at {place}: put the draft "
            "adapter on storage that all nodes share; the service goes on as it was"
        )
    return next(iter(names), None)


def _is_in_force(ingress: Any, model: ServeJob, running: Running, name: str | None) -> bool:
    """Whether every replica has the model's adapter; without replicas, whether it was the last
    one announced."""
    said: list[ReplicaStatus] = _told(ingress, model.name, "status", limit_s=_TAKE_S)
    if said:
        return {each.adapter for each in said} == {name}
    setting = Setting.of(model, running.built_s)
    asked: Any = control_of(model.name, setting).swapped.remote(running.built_s)
    swap: Any = ray.get(asked)
    job = running.job.each()[model.name]
    place = swap.adapter if swap else job.engine.draft_adapter
    return place == model.engine.draft_adapter


def _wait_until_taken(ingress: Any, model: ServeJob, name: str | None) -> None:
    """Returns once every replica has the adapter. Raises EngineError if one takes too long."""
    deadline = time.monotonic() + _TAKE_S
    while True:
        said: list[ReplicaStatus] = _told(ingress, model.name, "status", limit_s=_TAKE_S)
        if {each.adapter for each in said} <= {name}:
            return
        if time.monotonic() > deadline:
            raise EngineError(
                f"not every replica of {model.name!r} has gone over to {name or 'no adapter'} "
                f"within {_TAKE_S:g} s: its log says why; say the same again"
            )
        time.sleep(_LOOK_S)
