"""The service as a Serve application: checking, starting, updating and stopping it.

An update of draft adapters alone swaps them in all replicas, or in none; no request fails, and no
process is restarted:

1. Every replica fetches and reads the adapter, and checks it against the model
   (`replica/llm_server.py: LLMServer.prepare_adapter`). If one cannot, the swap ends there, and
   nothing has changed.
2. The model's actor announces that it is in force (`threshold_actor.py`).
3. Every replica takes it between two steps; one that starts later asks the actor first.
"""

import logging
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.util import list_named_actors

from mars_ray.autoscale.service_model import ServiceModel, load_service_model, prior_model, sized
from mars_ray.cluster.connection import fitted, sentence, served
from mars_ray.cluster.machine import check_port
from mars_ray.config.decode import EngineConfig
from mars_ray.config.serve import ServeJob
from mars_ray.config.vllm import VllmConfig
from mars_ray.core.frontier import read_frontier
from mars_ray.decode.request import check_context, window_of
from mars_ray.errors import CheckpointError, ConfigError, EngineError, ModelError, RequestError
from mars_ray.model.places import (
    check_adapter,
    check_architecture,
    config_of,
    pinned,
    pinned_adapter,
)
from mars_ray.serve.autoscaler import autoscaling, rays_rule
from mars_ray.serve.ingress.auth import ApiKeys
from mars_ray.serve.ingress.deployment import Ingress
from mars_ray.serve.ingress.router import PrefixRouter
from mars_ray.serve.preflight import preflight
from mars_ray.serve.protocol import ErrorInfo
from mars_ray.serve.replica.deployment import Replica
from mars_ray.serve.status import ReplicaStatus
from mars_ray.serve.threshold_actor import Setting, Swap, control_of, end_controls, kill_actors
from mars_ray.storage.place import Place, shown

logger = logging.getLogger(__name__)

APP_NAME = "mars-ray"
# The ingress only forwards.
_INGRESS_CPUS = 0.1
# Places beyond the engine's own limit, so that it can refuse the requests in them.
_REFUSAL_PLACES = 64
# How often an ending process checks whether its requests have finished.
_DRAIN_LOOK_S = 0.2
# Serve replaces a replica after three failed checks in a row.
_HEALTH_CHECK_S = 2.0
# Serve's loop and ours share a thread: neither blocks, the engine has a thread of its own, and a
# streamed message is handed over less often (docs/log.md).
_ENV = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


def build_app(job: ServeJob) -> serve.Application:
    """The application: one ingress in front of a deployment of replicas for each model.

    Raises ConfigError or ModelError if a checkpoint cannot be served with these settings.
    """
    if job.host not in ("127.0.0.1", "::1", "localhost") and not job.keys_file:
        logger.warning(
            "the service listens on %s and asks nobody for a key: set keys_file=", job.host
        )
    return _built(served(_checked(job)))


def _built(job: ServeJob) -> serve.Application:
    models = job.each()
    for name, model in models.items():
        most = model.most_replicas
        count = f"{most} replica" + "s" * (most != 1)
        if model.replicas == "auto" and most > model.scaling.min_replicas:
            count = f"up to {count}"
        said = sentence(count, model.gpus_per_replica or 0)
        print(f"{name}: {said}", file=sys.stderr, flush=True)
    built_s = time.time()
    ingress = serve.deployment(
        num_replicas=job.ingress_replicas,
        max_ongoing_requests=sum(_places(model) * model.most_replicas for model in models.values()),
        **_life(job),
        ray_actor_options={"num_cpus": _INGRESS_CPUS, "runtime_env": {"env_vars": _ENV}},
    )(Ingress)
    replicas = {name: _replicas(model, built_s) for name, model in models.items()}
    return ingress.bind(job, replicas, built_s)


def _replicas(job: ServeJob, built_s: float) -> serve.Application:
    """The deployment of a job's one model."""
    options: dict[str, Any] = {
        "num_cpus": job.cpus_per_replica,
        "num_gpus": job.gpus_per_replica or 0,
        "resources": job.resources_per_replica,
        "runtime_env": {"env_vars": _ENV | job.environment},
    }
    if isinstance(job.engine, VllmConfig) and job.engine.py_executable:
        options["runtime_env"]["py_executable"] = job.engine.py_executable
    placement: dict[str, Any] = {}
    if job.engine.workers > 1 and job.gpus_per_replica:
        # The replica's own process has no GPU: each of the engine's workers, actors of Ray too, has
        # one. Layers that are shared talk all the time, so those workers are on one machine.
        options["num_gpus"] = 0
        own = {"CPU": job.cpus_per_replica, **job.resources_per_replica, "GPU": 1.0}
        others: list[dict[str, float]] = [{"GPU": 1.0} for _ in range(job.engine.workers - 1)]
        is_split = job.engine.pipeline_parallel_size > 1
        placement["placement_group_bundles"] = [own, *others]
        placement["placement_group_strategy"] = "PACK" if is_split else "STRICT_PACK"
    count: dict[str, Any] = {"num_replicas": job.replicas}
    if job.replicas == "auto":
        policy = autoscaling(job, service_model(job)) if job.has_policy else rays_rule(job.scaling)
        count = {"autoscaling_config": policy}
    # Serve's own router takes the less loaded of two.
    router = {"request_router_class": PrefixRouter} if job.router == "prefix" else {}
    # Ray's annotation lacks its own default, None.
    per_node: Any = job.max_replicas_per_node
    replica = serve.deployment(
        name=job.deployment,
        max_replicas_per_node=per_node,
        **count,
        max_ongoing_requests=_places(job),
        request_router_config=router,
        **_life(job),
        **placement,
        ray_actor_options=options,
    )(Replica)
    return replica.bind(job, Setting.of(job, built_s))


def service_model(job: ServeJob) -> ServiceModel:
    """The service model by which the replicas are scaled, for steps of this job's engine: the
    operator's, or one from the frontier beside the checkpoint.

    Raises ConfigError.
    """
    engine, time_s = job.engine, job.scaling.slo.time_per_token_s
    # Whether the set-point moves requests that name no mode by the rule of `confidence`.
    follows_confidence = job.mode.is_elastic and job.mode.commits_unseen
    if job.service_model:
        given = load_service_model(job.service_model)
        if job.mode.is_elastic and (given.mode == "confidence") != follows_confidence:
            raise ConfigError(
                f"service_model {job.service_model} tells what thresholds of {given.mode!r} are "
                f"worth, and this service moves those of {job.mode.type!r}: name another "
                "service_model or default_mode"
            )
        return sized(given, engine, time_s)
    source, card = pinned(Place(job.checkpoint, job.revision))
    place, depth = source.name, card.block_size
    if engine.draft_adapter:
        place, draft_card = pinned_adapter(engine.draft_adapter)
        depth = draft_card.depths
    try:
        frontier = read_frontier(place)
    except CheckpointError as error:
        logger.info("only lossless levels for autoscaling: %s", error)
        frontier = None
    mode = "confidence" if follows_confidence else "verified"
    return sized(prior_model(job.name, frontier, depth, engine.max_batch, mode), engine, time_s)


def _places(job: ServeJob) -> int:
    """Serve's limit of requests at a replica. Our own limit is lower and answers with a 429; a
    request that Serve holds back would wait unseen."""
    return job.engine.max_batch + job.limits.waiting_requests + _REFUSAL_PLACES


def _life(job: ServeJob) -> dict[str, Any]:
    """Serve's lifecycle and logging options for the processes of a deployment."""
    return {
        # The ingress has a log of its own (serve/ingress/middleware.py).
        "logging_config": {"enable_access_log": False, "log_level": "WARNING"},
        "graceful_shutdown_timeout_s": job.drain_s,
        "graceful_shutdown_wait_loop_s": _DRAIN_LOOK_S,
        "health_check_period_s": _HEALTH_CHECK_S,
        "max_surge_percent": job.update_surge_percent,
    }


def check(job: ServeJob) -> None:
    """Checks as much of a job as is possible without a cluster, which takes long to start.

    Raises ConfigError or ModelError.
    """
    preflight(job)
    _checked(job)


def start(job: ServeJob, *, alone: bool = False) -> str:
    """Starts Serve and the application in it; returns the URL once it answers.

    A service that is `alone` on a cluster that ends with it has no more replicas than fit there.
    Raises ConfigError if the port is taken or Serve already runs on this cluster, EngineError if
    the replicas do not start.
    """
    app = build_app(fitted(job, _INGRESS_CPUS) if alone else job)
    running = serve.status()
    if APP_NAME in running.applications:
        raise ConfigError(
            "a service of mars-ray runs on this cluster already: stop it first with `mars-ray "
            "stop`, or change it with `mars-ray update`"
        )
    if running.proxies:
        raise ConfigError(
            "Ray Serve already runs on this cluster, with HTTP options of its own; stop it first "
            "with `serve shutdown`, or add this application to it with `serve deploy`"
        )
    check_port(job.host, job.port)
    # Actors of an earlier service that did not end properly.
    end_controls()
    # Serve's own log lines at the start would bury the command's output.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        http_options={"host": job.host, "port": job.port},
        proxy_location="HeadOnly",
        logging_config={"log_level": "WARNING"},
    )
    try:
        serve.run(app, name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        serve.shutdown()
        raise EngineError(f"the service did not start: {error}") from error
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(job.host, job.host)
    return f"http://[{host}]:{job.port}" if ":" in host else f"http://{host}:{job.port}"


def update(job: ServeJob) -> None:
    """Changes the running service to this job: new processes take over from the old ones. If only
    draft adapters differ, the old processes stay and swap them.

    No request fails meanwhile. Raises ConfigError if there is no service or it cannot be changed in
    this way, and EngineError if the new replicas do not start; the old ones then continue. Raises
    ModelError if a replica cannot load an adapter; all continue with the old one then.
    """
    job = served(_checked(job))
    app = _built(job)
    ingress, before, built_s = _running()
    host, port = before.host, before.port
    if (host, port) != (job.host, job.port):
        raise ConfigError(
            f"the service listens on {host}:{port} as long as it runs, so the job must say "
            f"host={host} port={port}"
        )
    if before.keys_file and not job.keys_file:
        raise ConfigError(
            "the running service asks for keys, and this job names no keys_file: it would answer "
            "anybody; name keys_file=, or stop the service first"
        )
    if _swap_adapters(ingress, before, built_s, job):
        return
    try:
        serve.run(app, name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        raise EngineError(f"the service was not updated: {error}") from error
    end_controls(before.each().keys() - job.each().keys())


def _running() -> tuple[Any, ServeJob, float]:
    """The handle of the running service's ingress, its job, and when it was deployed.

    Raises ConfigError.
    """
    if APP_NAME not in serve.status().applications:
        raise ConfigError("no service runs on this cluster: start one with `mars-ray serve`")
    ingress = serve.get_deployment_handle(Ingress.__name__, APP_NAME)
    job, built_s = ingress.running.remote().result()
    return ingress, job, built_s


def _checked(job: ServeJob) -> ServeJob:
    """The job with names of files and checkpoints that workers on other nodes also understand."""
    first, *others = (_checked_model(model) for model in job.each().values())
    ApiKeys(job.keys_file).check_models([model.name for model in (first, *others)])
    changes: dict[str, Any] = {"more_models": tuple(others)}
    if job.request_log:
        changes["request_log"] = str(Path(job.request_log).resolve())
    if job.keys_file:
        changes["keys_file"] = str(Path(job.keys_file).resolve())
    return first.model_copy(update=changes)


def _checked_model(job: ServeJob) -> ServeJob:
    """The job with its checkpoint pinned; only card and configuration are fetched here."""
    source, card = pinned(Place(job.checkpoint, job.revision))
    engine = job.engine
    if engine.draft_adapter:
        # Whether it is for this model depends on the model's weights, which are read here only if
        # they are in a directory; otherwise the replicas check it.
        is_here = not source.is_uri and not source.is_on_hub
        place, draft_card = pinned_adapter(engine.draft_adapter)
        check_adapter(place, job.model_cache, source.name if is_here else None)
        card = replace(card, block_size=draft_card.depths)
        engine = engine.model_copy(update={"draft_adapter": place})
    if mode := job.default_mode:
        # An unnamed one is `verified`, and `exact` where that needs an adapter and has none. The
        # replicas decide that (`serve/replica/llm_server.py`), because an adapter may come later.
        if not mode.is_served:
            raise ConfigError(f"default_mode {mode.type!r} is not served; use 'verified'")
        try:
            window_of(mode, card)
        except RequestError as error:
            raise ConfigError(f"default_mode of {shown(job.checkpoint)}: {error}") from error
    if isinstance(engine, EngineConfig):  # vLLM checks it itself, for more architectures
        check_architecture(source)
        if engine.max_context is not None:
            check_context(engine.max_context, config_of(source))
    changes = {"checkpoint": source.name, "revision": source.revision, "engine": engine}
    return job.model_copy(update=changes)


_POLL_S = 0.1
# Serve's proxy may still be sending to clients what the ingress has passed to it.
_FLUSH_S = 1.0
_ANSWER_S = 10.0
# How often a service looks whether another command has stopped it, and how many looks tell it so.
_GONE_LOOK_S, _GONE_LOOKS = 2.0, 2
_CONTROLLER = "SERVE_CONTROLLER_ACTOR"  # by Ray's name


def wait_until_stopped(job: ServeJob) -> None:
    """Blocks until SIGINT or SIGTERM, then drains the job's service and stops Serve; or until
    another command has done so.

    A second signal ends the draining at once. Must run in the main thread, which gets the signals.
    """
    stopped, at_once = threading.Event(), threading.Event()
    is_drained, missing = False, 0

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        (at_once if stopped.is_set() else stopped).set()

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, on_signal) for number in signals]
    try:
        while not stopped.wait(_GONE_LOOK_S):
            missing = 0 if _serve_runs() else missing + 1
            if missing == _GONE_LOOKS:
                logger.warning("another command has stopped the service")
                break
        else:
            print("what was accepted is finished first", file=sys.stderr, flush=True)
            is_drained = drain(job.drain_s, at_once)
    finally:
        # What is left may hang, and then a signal must end it.
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
        if missing < _GONE_LOOKS:
            _end(is_drained)


def _serve_runs() -> bool:
    """Whether the cluster has Serve's controller, as far as it can be asked."""
    try:
        actors: Any = list_named_actors(all_namespaces=True)  # Ray annotates the other case
    except (RayError, RuntimeError):
        return True
    return any(actor["name"] == _CONTROLLER for actor in actors)


def stop() -> list[str]:
    """Drains the service that runs on this cluster, and stops Serve; returns its models.

    Raises ConfigError if there is none.
    """
    _, job, _ = _running()
    said = f"stopping {', '.join(job.each())} at http://{job.host}:{job.port}"
    print(said, file=sys.stderr, flush=True)
    is_drained = False
    try:
        is_drained = drain(job.drain_s, threading.Event())
    finally:
        _end(is_drained)
    return list(job.each())


def _end(is_drained: bool) -> None:
    """Stops Serve; what is not finished is cut."""
    if not is_drained:
        # Serve alone would give the replicas time to drain once more.
        kill_actors(lambda actor: actor["name"].startswith(f"SERVE_REPLICA::{APP_NAME}#"))
    serve.shutdown()
    end_controls()


def drain(limit_s: float, at_once: threading.Event) -> bool:
    """Refuses new requests and waits for the accepted ones, until the limit or until `at_once`.

    Returns whether all of them are finished.
    """
    deadline = time.monotonic() + limit_s
    try:
        ingress = serve.get_deployment_handle(Ingress.__name__, APP_NAME)
        ingress.broadcast("close").results(timeout_s=_ANSWER_S)
        while open_requests := sum(ingress.broadcast("inside").results(timeout_s=_ANSWER_S)):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or at_once.is_set():
                logger.warning("%d accepted requests were not finished", open_requests)
                return False
            at_once.wait(_POLL_S)
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("the ingress cannot be asked what it has accepted: %s", error)
        return False
    at_once.wait(_FLUSH_S)
    return True


# An adapter has a few megabytes, but a store may be slow.
_PREPARE_S = 120.0
_TAKE_S = 30.0
_LOOK_S = 0.1


def _swap_adapters(ingress: Any, before: ServeJob, built_s: float, job: ServeJob) -> bool:
    """Puts the job in force if only its adapters are new; returns whether that is so.

    Raises ModelError if a replica cannot load an adapter, and then nothing has changed; EngineError
    if replicas do not answer in time.
    """
    if _without_adapters(job) != _without_adapters(before):
        return False
    prepared = {name: _prepared(ingress, model) for name, model in job.each().items()}
    new = []
    for name, model in job.each().items():
        control, place = control_of(name, Setting.of(model, built_s)), model.engine.draft_adapter
        if replicas := _replies(ingress, name, "status", limit_s=_TAKE_S):
            is_in_force = {each.adapter for each in replicas} == {prepared[name]}
        else:  # whether it was the last one announced
            swap: Any = ray.get(control.swapped.remote(built_s))
            known = swap.adapter if swap else before.each()[name].engine.draft_adapter
            is_in_force = known == place
        if not is_in_force:
            new.append((name, control, Swap(built_s, time.time(), place, prepared[name])))
    for _, control, swap in new:
        ray.get(control.swap.remote(swap))
    for name, _, swap in new:
        _wait_until_taken(ingress, name, swap.name)
    return bool(new)


def _without_adapters(job: ServeJob) -> list[dict[str, Any]]:
    tables = [model.model_dump() for model in job.each().values()]
    for table in tables:
        table["engine"]["draft_adapter"] = None
    return tables


def _replies(ingress: Any, name: str, method: str, *args: Any, limit_s: float) -> list[Any]:
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
    names = set(_replies(ingress, model.name, "prepare_adapter", place, limit_s=_PREPARE_S))
    for fault in names:
        if isinstance(fault, ErrorInfo):
            raise ModelError(f"{fault.message}; the service goes on as it was")
    if len(names) > 1:
        raise ModelError(
            f"the replicas of {model.name!r} find different files at {place}: put the draft "
            "adapter on storage that all nodes share; the service goes on as it was"
        )
    return next(iter(names), None)


def _wait_until_taken(ingress: Any, model: str, adapter: str | None) -> None:
    """Returns once every replica has the adapter. Raises EngineError if one takes too long."""
    deadline = time.monotonic() + _TAKE_S
    while True:
        replicas: list[ReplicaStatus] = _replies(ingress, model, "status", limit_s=_TAKE_S)
        if {each.adapter for each in replicas} <= {adapter}:
            return
        if time.monotonic() > deadline:
            raise EngineError(
                f"not every replica of {model!r} has gone over to {adapter or 'no adapter'} "
                f"within {_TAKE_S:g} s: its log says why; say the same again"
            )
        time.sleep(_LOOK_S)
