"""The workers and engines that fit on the connected cluster."""

from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mars_ray.adapt.jobs import Devices
from mars_ray.model.load import multiplies_bfloat16


def devices() -> Devices:
    """One worker per GPU. Without GPUs: two workers on a single node, otherwise one per node.

    One engine per node or GPU writes answers: a CPU's engines would share its memory bandwidth.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = [node["Resources"] for node in alive]
    working = [node for node in alive if node["Resources"].get("CPU", 0.0) >= 1]
    cpus = [node["Resources"]["CPU"] for node in working]
    gpus = int(sum(node.get("GPU", 0.0) for node in nodes))
    if gpus:
        each = max(1.0, min(cpus, default=1.0) // max(1, gpus // len(nodes)))
        return Devices(gpus, each, 1.0, gpus, each, "bfloat16")
    least = min(cpus, default=1.0)
    precision = _precision(working)
    if len(cpus) > 1:
        return Devices(len(cpus), least, 0.0, len(cpus), least, precision)
    workers = 2 if least >= 2 else 1
    return Devices(workers, least // workers, 0.0, 1, least, precision)


def _precision(nodes: list[dict[str, Any]]) -> Literal["float32", "bfloat16"]:
    """The faster precision of these nodes' CPUs, which may differ from this machine's."""
    asked = ray.remote(num_cpus=0)(multiplies_bfloat16)
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    said = ray.get([asked.options(scheduling_strategy=place).remote() for place in places])
    return "bfloat16" if all(said) else "float32"
