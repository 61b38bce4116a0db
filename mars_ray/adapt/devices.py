"""What the cluster at hand has for training and for answers."""

from dataclasses import dataclass

import ray


@dataclass(frozen=True, slots=True)
class Devices:
    """How many workers, and what each gets."""

    workers: int
    cpus_per_worker: float
    gpus_per_worker: float
    engines: int  # that answer
    cpus_per_engine: float


def devices() -> Devices:
    """A worker for every GPU; without GPUs two workers on a node alone, and else one a node.

    Answers come from one engine a node, or a GPU: a CPU's engines would share its memory bandwidth.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = [node.get("CPU", 0.0) for node in nodes if node.get("CPU", 0.0) >= 1]
    gpus = int(sum(node.get("GPU", 0.0) for node in nodes))
    if gpus:
        each = max(1.0, min(cpus, default=1.0) // max(1, gpus // len(nodes)))
        return Devices(gpus, each, 1.0, gpus, each)
    least = min(cpus, default=1.0)
    if len(cpus) > 1:
        return Devices(len(cpus), least, 0.0, len(cpus), least)
    workers = 2 if least >= 2 else 1
    return Devices(workers, least // workers, 0.0, 1, least)
