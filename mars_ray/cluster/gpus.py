"""How many GPUs each process gets: as many as its job says, or one where the cluster has any.

Decided here alone, once a command is connected.
"""

import ray

from mars_ray.config.decode import EngineConfig
from mars_ray.config.serve import ServeJob
from mars_ray.config.train import ClusterConfig
from mars_ray.errors import ConfigError


def cluster_gpus() -> float:
    """GPUs of the cluster's nodes, as Ray counts them; none without a connection."""
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


def trained(cluster: ClusterConfig) -> ClusterConfig:
    """The cluster section of a training job with the GPUs of each worker."""
    each = gpus_each(cluster.gpus_per_worker, cluster_gpus())
    return cluster.model_copy(update={"gpus_per_worker": each})


def sentence(count: str, each: float) -> str:
    """What is said at a start of so many processes with so many GPUs each."""
    there = cluster_gpus()
    if each:
        return f"{count}, each with {each:g} of the cluster's {there:g} GPUs"
    return f"{count} on CPUs; the cluster has {f'{there:g} GPUs' if there else 'no GPU'}"
