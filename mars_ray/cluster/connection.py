"""The cluster that a command runs on, and how many GPUs each process gets there.

The cluster is one that is named, or the command's own, which is started late. A process gets as
many GPUs as its job says, or one where the cluster has any; that is decided here alone, once a
command is connected.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mars_ray.cluster.machine import NODE_ENVIRONMENT, ask_for_token, end_haproxy, listens
from mars_ray.config.decode import EngineConfig
from mars_ray.config.serve import ServeJob
from mars_ray.config.train import ClusterConfig
from mars_ray.errors import ConfigError

_OWN = "local"
# A label of the node that a command has started for itself.
_OWN_LABEL = "mars-ray/ends-with-its-command"
_ROUNDING = 1e-9  # of CPUs that are taken away in tenths
_RAYS_TOKENS = "ray._private.authentication.authentication_token_setup"


def named_address() -> str | None:
    address = os.environ.get("RAY_ADDRESS", _OWN)
    return None if address == _OWN else address


class Connection:
    """A context with the cluster that RAY_ADDRESS names; without one with a cluster of its own, or
    with `otherwise="auto"` with the one that runs on this machine.

    A cluster of its own takes many seconds to start, and so it starts when it is first needed:
    whatever is wrong with a job's inputs is found before.
    """

    def __init__(self, otherwise: str = _OWN, *, log_to_driver: bool = True) -> None:
        self._address = named_address() or otherwise
        self._log_to_driver = log_to_driver
        self._is_open = False

    def __enter__(self) -> "Connection":
        if self._address != _OWN:
            self.open()
        return self

    def open(self) -> None:
        """Connects, or starts the cluster, unless that was done. Raises ConfigError if none answers
        at the address."""
        if self._is_open:
            return
        for name, value in NODE_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if self._address == _OWN:
            ask_for_token()
            # It would warn that a cluster asks for a token, which is what was wanted.
            logging.getLogger(_RAYS_TOKENS).setLevel(logging.ERROR)
        elif not listens(self._address):
            # Ray would go on trying for minutes.
            raise ConfigError(
                f"no Ray cluster answers at {self._address!r} (RAY_ADDRESS): nothing listens "
                "there; leave RAY_ADDRESS out for a Ray of this machine, or name the one that "
                "`mars-ray serve` has printed"
            )
        import ray
        from ray._private.services import find_gcs_addresses

        if self._address == "auto" and len(found := find_gcs_addresses()) > 1:
            raise ConfigError(
                f"several Ray clusters run on this machine, at {', '.join(sorted(found))}: name "
                "the one you mean with RAY_ADDRESS=HOST:PORT"
            )
        try:
            with _uninterrupted():
                ray.init(
                    address=self._address,
                    include_dashboard=None,
                    log_to_driver=self._log_to_driver,
                    labels={_OWN_LABEL: "true"} if self._address == _OWN else None,
                )
                self._is_open = True
        # ValueError: RAY_ADDRESS is not an address.
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster answers at {self._address!r}: {str(error).rstrip('. ')}. Name the "
                "one you mean with RAY_ADDRESS=HOST:PORT, and RAY_AUTH_MODE=token if it asks for a "
                "token; `mars-ray serve` says both of its own"
            ) from error

    def check_lasting(self) -> None:
        """Raises ConfigError if the cluster is another command's own, and ends with it."""
        import ray

        if any(_OWN_LABEL in node["Labels"] for node in ray.nodes()):
            raise ConfigError(
                "the Ray cluster that runs on this machine is another command's own and ends with "
                "it: start one that stays, by `mars-ray cluster up` or `ray start --head`, and "
                "name it with RAY_ADDRESS"
            )

    def __exit__(self, *_: Any) -> None:
        if self._is_open:
            import ray

            is_own = self._address == _OWN and ray.is_initialized()
            node = ray.get_runtime_context().get_node_id() if is_own else None
            ray.shutdown()
            if node:
                end_haproxy(node)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of this context: a connection that Ray has made in part crashes the
    process. A second one acts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, asked = signal.getsignal(signal.SIGINT), False

    def on_signal(*_: Any) -> None:
        nonlocal asked
        if asked:
            signal.signal(signal.SIGINT, before)
            signal.raise_signal(signal.SIGINT)
        asked = True

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if asked:
            signal.raise_signal(signal.SIGINT)


# Called before the first use of Ray: `Connection.open`, or `already` where it is connected.
Connect = Callable[[], None]


def already() -> None:
    """Nothing: the connection is there."""


def cluster_gpus() -> float:
    """GPUs of the cluster's nodes, as Ray counts them; none without a connection."""
    import ray

    return ray.cluster_resources().get("GPU", 0.0) if ray.is_initialized() else 0.0


def gpus_each(asked: float | None, gpus: float, workers: int = 1) -> float:
    """GPUs of a process, or of its `workers`, on a cluster that has so many."""
    if asked is not None:
        return asked
    return workers if gpus >= 1 else 0


def served(job: ServeJob) -> ServeJob:
    """A service's job with the GPUs of each model's replicas; replicas without one compute on CPUs.

    Raises ConfigError if a model cannot be served so.
    """
    gpus = cluster_gpus()
    first, *others = (_served(model, gpus) for model in job.each().values())
    return first.model_copy(update={"more_models": tuple(others)})


def _served(job: ServeJob, gpus: float) -> ServeJob:
    engine = job.engine
    is_own = isinstance(engine, EngineConfig)
    if is_own and engine.device == "cpu":
        gpus = 0
    each = gpus_each(job.gpus_per_replica, gpus, engine.workers)
    if is_own and not each:
        if engine.device == "cuda":
            raise ConfigError(
                f"{job.name}: engine.device 'cuda' and no GPU for a replica, of the cluster's "
                f"{gpus:g}: leave gpus_per_replica and engine.device out"
            )
        engine = engine.model_copy(update={"device": "cpu"})
    # Its fields contradict each other only now.
    changed = {**dict(job), "gpus_per_replica": each, "engine": engine}
    try:
        return ServeJob(**changed)
    except ValueError as error:
        raise ConfigError(f"{job.name}: {error}") from None


def fitted(job: ServeJob, ingress_cpus: float) -> ServeJob:
    """A service's job with no more replicas than there is room for on the command's own cluster,
    which is this machine and never grows.

    Raises ConfigError if the least number of replicas has no room.
    """
    import ray

    there = {name: float(amount) for name, amount in ray.cluster_resources().items()}
    there["CPU"] = there.get("CPU", 0.0) - ingress_cpus * job.ingress_replicas
    there.setdefault("GPU", 0.0)
    left = dict(there)
    first, *others = (_fitted(model, there, left) for model in job.each().values())
    return first.model_copy(update={"more_models": tuple(others)})


def _fitted(job: ServeJob, there: dict[str, float], left: dict[str, float]) -> ServeJob:
    """One model's job; what its least number of replicas takes is no longer left."""
    each = gpus_each(job.gpus_per_replica, there["GPU"], job.engine.workers)
    if each > there["GPU"]:
        raise ConfigError(
            f"{job.name}: gpus_per_replica={each:g} (--gpus), and this machine has "
            f"{there['GPU']:g} GPUs: leave it out to compute on CPUs, or name a cluster with "
            "RAY_ADDRESS"
        )
    needs = {"CPU": job.cpus_per_replica, "GPU": each}
    scaling = job.scaling
    least = scaling.min_replicas if job.replicas == "auto" else job.replicas
    for name, need in needs.items():
        if least * need > left[name] + _ROUNDING:
            raise ConfigError(
                f"{job.name}: its replicas need {least} x {need:g} {name}, and this machine has "
                f"{left[name]:g} left: ask for fewer (replicas=), give each less "
                "(cpus_per_replica=), or name a cluster with RAY_ADDRESS"
            )
        left[name] -= least * need
    if job.replicas != "auto":
        return job
    room = [int(there[name] / need + _ROUNDING) for name, need in needs.items() if need]
    most = min([scaling.max_replicas, *room])
    if most < scaling.max_replicas and "max_replicas" in scaling.model_fields_set:
        said = f"{job.name}: this machine has room for {most} of {scaling.max_replicas} replicas"
        print(said, file=sys.stderr, flush=True)
    scaling = scaling.model_copy(update={"max_replicas": most})
    return job.model_copy(update={"scaling": scaling})


# What is said where nodes come when they are asked for, and none is there to be looked at.
NOT_STARTED = (
    "no worker has started yet: start one by `ray job submit --entrypoint-num-gpus 1 -- true`, "
    "or for CPUs --entrypoint-num-cpus 1, or by min_workers in the cluster's file"
)


def trained(cluster: ClusterConfig) -> ClusterConfig:
    """The cluster section of a training job with the GPUs of each worker.

    Raises ConfigError if the job does not say it and no node is there to compute on.
    """
    import ray

    if cluster.gpus_per_worker is None and ray.is_initialized():
        there = ray.cluster_resources()
        if not (there.get("CPU") or there.get("GPU")):
            raise ConfigError(f"{NOT_STARTED}; or set cluster.gpus_per_worker")
    each = gpus_each(cluster.gpus_per_worker, cluster_gpus())
    return cluster.model_copy(update={"gpus_per_worker": each})


def sentence(count: str, each: float) -> str:
    """What is said at a start of so many processes with so many GPUs each."""
    there = cluster_gpus()
    if each:
        return f"{count}, each with {each:g} of the cluster's {there:g} GPUs"
    return f"{count} on CPUs; the cluster has {f'{there:g} GPUs' if there else 'no GPU'}"
