"""A small named actor for each model, which changes while the service runs: on it replicas wait for
the set-point and for another draft adapter.

A publisher does not wait; a replica has the news some milliseconds later, and a new one asks for it
first. The actor outlives the process that made it, and updates of the service. Replicas report
their job's setting to it, and the newest job counts, however it was deployed.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Callable, Container, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util import list_named_actors
from ray.util.metrics import Gauge

from mars_ray.autoscale.threshold import SetPoint
from mars_ray.config.serve import ServeJob
from mars_ray.errors import ConfigError
from mars_ray.serve.status import Decided

_NAMESPACE = "mars-ray"
# A wait ends without news after this time, so that none lasts for a caller that is gone.
_WAIT_S = 30.0
_RETRY_S = 0.5
_ANSWER_S = 2.0
_LATE_S = 60.0
_KEPT = 4096  # decisions of half an hour
_GAUGES = (
    (
        "mars_autoscaling_utilisation",
        "Share of a replica's modelled capacity at which requests are in time, as learnt.",
    ),
    ("mars_autoscaling_floor_replicas", "Replicas kept for what this service is known to get."),
    (
        "mars_autoscaling_error_budget_spent",
        "Late requests of the last hour over those that the objective allows.",
    ),
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setting:
    """A job's settings of its model's threshold."""

    at_s: float  # wall-clock time at which the application was built
    set_point: float  # the set-point at rest
    is_auto: bool  # whether the policy changes it from there
    floor: float = 0.0  # the lowest threshold of requests that name no quality

    @classmethod
    def of(cls, job: ServeJob, built_s: float) -> "Setting":
        floor = job.qualities[job.default_quality]
        return cls(built_s, job.set_point, job.has_policy, floor)


@dataclass(frozen=True, slots=True)
class Swap:
    """A draft adapter that replaces the job's in one application's replicas; it may be none."""

    built_s: float  # when that application was built; earlier and later ones have other jobs
    at_s: float
    adapter: str | None  # its place, valid on every node
    name: str | None  # its name in replies


@dataclass(frozen=True, slots=True)
class News:
    """The set-point in force, and the last swap of draft adapters."""

    version: int
    set_point: SetPoint
    swap: Swap | None = None


class ThresholdActor:
    """The actor. A version counts changes; each new actor begins at another number."""

    def __init__(self, setting: Setting, model: str = "") -> None:
        """`model` is the label of the metrics."""
        self._setting = setting
        # On every Ray node's Prometheus endpoint under `ray_mars_...`.
        self._gauges = [
            Gauge(name, text, ("model_name",)).set_default_tags({"model_name": model})
            for name, text in _GAUGES
        ]
        self._news = News(secrets.randbits(48), SetPoint(setting.set_point))
        self._changed = asyncio.Event()
        self._history: deque[Decided] = deque(maxlen=_KEPT)

    async def adopt(self, setting: Setting, swap: Swap | None = None) -> None:
        """Takes the setting of the newest job.

        A fixed fleet begins with its own set-point if that has changed, or if a policy chose
        before; otherwise the set-point of an operator stays in force.
        `swap` is the last one that the replica knows: a new actor learns it from there after the
        loss of the old one.
        """
        if swap:
            await self.swap(swap)
        if setting.at_s <= self._setting.at_s:
            return
        before, self._setting = self._setting, setting
        if not setting.is_auto and (before.is_auto or before.set_point != setting.set_point):
            self._history.clear()
            await self.publish(SetPoint(setting.set_point))

    async def is_auto(self) -> bool:
        return self._setting.is_auto

    async def floor(self) -> float:
        return self._setting.floor

    async def publish(self, set_point: SetPoint, decided: Decided | None = None) -> None:
        """Puts a set-point in force; an unchanged one does not count as a change.

        The autoscaling policy also tells what it has decided; it is not heard once the service has
        changed to a fixed number of replicas, nor if it decided a little earlier than what is
        known: calls that waited for this actor's start come in any order. What seems much earlier
        is of a controller whose clock went back.
        """
        if decided:
            known = self._history[-1].at_s if self._history else 0.0
            if not self._setting.is_auto or known - _LATE_S < decided.at_s < known:
                return
            self._history.append(decided)
            for gauge, value in zip(
                self._gauges,
                (decided.utilisation, decided.floor_replicas, decided.error_budget_spent),
                strict=True,
            ):
                gauge.set(value)
        self._change(replace(self._news, set_point=set_point))

    async def history(self) -> list[Decided]:
        return list(self._history)

    async def newest(self) -> Decided | None:
        """The last decision, if a policy has decided."""
        return self._history[-1] if self._history else None

    async def swap(self, swap: Swap) -> None:
        """Makes replicas of that application take this adapter, unless they know a newer one."""
        known = self._news.swap
        if known is None or known.at_s < swap.at_s:
            self._change(replace(self._news, swap=swap))

    async def swapped(self, built_s: float) -> Swap | None:
        """The last swap of that application, if there was one."""
        swap = self._news.swap
        return swap if swap and swap.built_s == built_s else None

    def _change(self, news: News) -> None:
        if news != self._news:
            self._news = replace(news, version=news.version + 1)
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait(self, version: int | None) -> News:
        """What is new, once its version differs from this one; with None, at once."""
        changed = self._changed
        if self._news.version == version:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_S):
                    await changed.wait()
        return self._news


def control_of(model: str, setting: Setting) -> Any:
    """The handle of a model's actor, made with this setting if there is none."""
    options: dict[str, Any] = {
        "name": f"control:{model}",
        "namespace": _NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
    }
    return ray.remote(ThresholdActor).options(**options).remote(setting, model)


async def swapped(model: str, built_s: float) -> Swap | None:
    """The swap that replaces the job's adapter in this application. None also if the actor does not
    answer in time, because replicas get it later through `follow`."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            control = await asyncio.to_thread(_actor, model)
            return await control.swapped.remote(built_s)
    except ValueError:
        return None  # the first replica finds no actor
    except (TimeoutError, RayError) as error:
        logger.warning("whether %s has another draft adapter is not known yet: %s", model, error)
        return None


async def newest_decision(model: str) -> Decided | None:
    """The policy's last decision on a model; None if there is none, or if its actor does not answer
    in time."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            control = await asyncio.to_thread(_actor, model)
            return await control.newest.remote()
    except (ValueError, TimeoutError, RayError):
        return None


def publish(model: str, threshold: float) -> float:
    """Makes the model's replicas change to this threshold; returns the lowest one of requests that
    name no quality.

    Raises ConfigError if no service has this model, or the policy chooses its threshold.
    """
    try:
        control = _actor(model)
    except ValueError as error:
        raise ConfigError(f"no service on this cluster has a model {model!r}") from error
    if ray.get(control.is_auto.remote()):
        raise ConfigError(
            f"the threshold of {model!r} is the autoscaling policy's to choose: change "
            "`scaling.threshold` in the job and tell the service with `mars-ray update`, "
            "or give it a fixed number of `replicas` and say this again"
        )
    ray.get(control.publish.remote(SetPoint(threshold)))
    return ray.get(control.floor.remote())


def _actor(model: str) -> Any:
    """The handle of a model's actor. Raises ValueError if there is none."""
    return ray.get_actor(f"control:{model}", namespace=_NAMESPACE)


def kill_actors(is_chosen: Callable[[dict[str, str]], bool]) -> None:
    """Kills the actors that are chosen by their `name` and `namespace`."""
    actors: Any = list_named_actors(all_namespaces=True)  # Ray annotates the other case
    for actor in filter(is_chosen, actors):
        # The actor may have ended meanwhile.
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(**actor))


def end_controls(models: Container[str] | None = None) -> None:
    """Ends the actors of these models, which are no longer served; of all, once Serve has ended."""

    def is_ours(actor: dict[str, str]) -> bool:
        prefix, _, model = actor["name"].partition(":")
        is_control = (prefix, actor["namespace"]) == ("control", _NAMESPACE)
        return is_control and (models is None or model in models)

    kill_actors(is_ours)


async def follow(
    model: str,
    setting: Setting,
    apply: Callable[[News], Coroutine[Any, Any, None]],
    swapped: Callable[[], Swap | None] = lambda: None,
) -> None:
    """Applies all news until cancelled. `setting` is the job's own, and `swapped` returns
    the swap that was applied in place of the job's adapter."""
    version = None
    while True:
        try:
            control = control_of(model, setting)
            await control.adopt.remote(setting, swapped())
            while True:
                news = await control.wait.remote(version)
                version = news.version
                await apply(news)
        except RayError as error:
            # Either the actor has died, and the next one counts its versions anew, or the cluster's
            # head is unreachable, and the threshold would stay in force until the replica ends.
            if not isinstance(error, RayActorError):
                logger.warning(
                    "the set-point of %s cannot be followed, again soon: %s", model, error
                )
            version = None
            await asyncio.sleep(_RETRY_S)
