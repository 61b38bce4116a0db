"""The service as a Serve application, and its start and stop."""

import logging
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from ray import serve

from mars_ray.config.decode import BlockCachedMode
from mars_ray.config.serve import ServeJob
from mars_ray.decode.request import window_of
from mars_ray.errors import ConfigError, EngineError, RequestError
from mars_ray.model.source import Source, pinned
from mars_ray.serve.ingress import Ingress
from mars_ray.serve.keys import Keys
from mars_ray.serve.replica import Replica
from mars_ray.serve.router import PrefixRouter

logger = logging.getLogger(__name__)

APP_NAME = "mars-ray"
# The ingress only forwards.
_INGRESS_CPUS = 0.1
# Places beyond the engine's own limit, for requests on their way to be refused by it.
_REFUSAL_PLACES = 64
_ROUTERS = {
    "prefix": {"request_router_class": PrefixRouter},
    "power_of_two": {},
}
# Serve's own loops and ours in one thread each: neither blocks, the engine has a thread of its own,
# and without the hand-overs a streamed message takes 40% less CPU (docs/log.md).
_ENV = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def build_app(job: ServeJob) -> serve.Application:
    """The application: one ingress before a deployment of replicas for each model.

    Raises ConfigError or ModelError if a checkpoint cannot be served so.
    """
    job = _checked(job)
    models = job.each()
    ingress = serve.deployment(
        max_ongoing_requests=sum(_places(model) * model.replicas for model in models.values()),
        ray_actor_options={"num_cpus": _INGRESS_CPUS, "runtime_env": {"env_vars": _ENV}},
    )(Ingress)
    return ingress.bind(job, {name: _replicas(model) for name, model in models.items()})


def _replicas(job: ServeJob) -> serve.Application:
    """The deployment of a job's one model."""
    # Ray's annotation leaves out its own default, None.
    per_node: Any = job.max_replicas_per_node
    replica = serve.deployment(
        name=job.deployment,
        num_replicas=job.replicas,
        max_replicas_per_node=per_node,
        # The ingress logs every request already.
        logging_config={"enable_access_log": False},
        max_ongoing_requests=_places(job),
        request_router_config=_ROUTERS[job.router],
        ray_actor_options=_actor_options(job),
    )(Replica)
    return replica.bind(job)


def _places(job: ServeJob) -> int:
    """Requests at a replica. Below this limit of Serve's is ours, which answers with a 429; a
    request that Serve holds back waits unseen."""
    return job.engine.max_batch + job.limits.waiting_requests + _REFUSAL_PLACES


def _actor_options(job: ServeJob) -> dict[str, Any]:
    return {
        "num_cpus": job.cpus_per_replica,
        "num_gpus": job.gpus_per_replica,
        "resources": job.resources_per_replica,
        "runtime_env": {"env_vars": _ENV | job.environment},
    }


def start(job: ServeJob) -> str:
    """Starts Serve and the application in it; returns the URL once it answers.

    Raises ConfigError if the port is taken or Serve already runs on this cluster, EngineError if
    the replicas do not come up.
    """
    app = build_app(job)
    if serve.status().proxies:
        raise ConfigError(
            "Ray Serve already runs on this cluster, with HTTP options of its own; stop it first "
            "with `serve shutdown`, or add this application to it with `serve deploy`"
        )
    _check_port(job.host, job.port)
    # What Serve says of itself while it starts would bury what the command says.
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
    host = _ANY_HOST.get(job.host, job.host)
    return f"http://[{host}]:{job.port}" if ":" in host else f"http://{host}:{job.port}"


def wait_until_stopped() -> None:
    """Blocks until SIGINT or SIGTERM, then stops Serve.

    Only for the main thread, which receives the signals.
    """
    stopped = threading.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stopped.set()) for number in signals]
    try:
        stopped.wait()
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
        serve.shutdown()


def _checked(job: ServeJob) -> ServeJob:
    """The job with names of files and checkpoints that also workers elsewhere understand."""
    first, *others = (_checked_model(model) for model in job.each().values())
    Keys(job.keys_file).check_models([model.name for model in (first, *others)])
    changes: dict[str, Any] = {"more_models": tuple(others)}
    if job.keys_file:
        changes["keys_file"] = str(Path(job.keys_file).resolve())
    elif job.host not in _LOOPBACK:
        logger.warning(
            "the service listens on %s and asks nobody for a key: set keys_file=", job.host
        )
    return first.model_copy(update=changes)


def _checked_model(job: ServeJob) -> ServeJob:
    """With the checkpoint pinned; only its card is fetched here."""
    source, card = pinned(Source(job.checkpoint, job.revision))
    if isinstance(job.default_mode, BlockCachedMode):
        raise ConfigError("default_mode 'block_cached' is not served; use 'verified'")
    try:
        window_of(job.default_mode, card)
    except RequestError as error:
        raise ConfigError(f"default_mode of {job.checkpoint}: {error}") from error
    engine = job.engine
    if engine.draft_model:
        drafts, _ = pinned(Source(engine.draft_model))
        engine = engine.model_copy(update={"draft_model": drafts.name})
    return job.model_copy(
        update={
            "checkpoint": source.name,
            "revision": source.revision,
            "engine": engine,
        }
    )


def _check_port(host: str, port: int) -> None:
    """Serve's proxy shares a port with whoever else shares it, and then gets half the requests."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; set another host= or port="
            ) from error
