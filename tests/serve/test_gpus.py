"""GPUs are used where a cluster has them. Ray counts some here that do not exist: what runs on them
finds no CUDA, and computes on the CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mars_ray.adapt.jobs import Places, service_table
from mars_ray.cluster.connection import gpus_each, sentence, served, trained
from mars_ray.config.adapt import AdaptJob, ServiceConfig
from mars_ray.config.serve import ServeJob
from mars_ray.config.train import ClusterConfig

# On a cluster with so many GPUs: what jobs resolve to, and with some engines that answer and a
# service.
SCRIPT = """
import contextlib, io, json, os, sys
import ray
from pathlib import Path
from rich.console import Console
from mars_ray.adapt.run import devices
from mars_ray.cluster.connection import served, trained
from mars_ray.cluster.machine import NODE_ENVIRONMENT, free_port
from mars_ray.config.inputs import CorpusSource
from mars_ray.config.generate import GenerateJob
from mars_ray.config.serve import ServeJob
from mars_ray.config.train import ClusterConfig
from mars_ray.errors import ConfigError
from mars_ray.generate.on_ray import RayEngines
from mars_ray.generate.run import run_generation
from mars_ray.serve.deploy import start

checkpoint, output, gpus = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.environ.update(NODE_ENVIRONMENT)
ray.init(address="local", num_cpus=4, num_gpus=gpus, include_dashboard=False, log_to_driver=False)
size = {"max_batch": 2, "max_context": 160, "threads": 1}

def of(**table):
    try:
        job = served(ServeJob.model_validate({"checkpoint": checkpoint} | table))
    except ConfigError as error:
        return str(error)
    engine = job.engine
    return [job.gpus_per_replica, getattr(engine, "device", None)]

split = {"type": "vllm", "tensor_parallel_size": 2}
facts = {
    "default": of(),
    "cpus": of(gpus_per_replica=0),
    "a part": of(gpus_per_replica=0.5),
    "engine on cpu": of(engine={"device": "cpu"}),
    "engine on cuda": of(engine={"device": "cuda"}),
    "vllm": of(engine={"type": "vllm"}),
    "two of vllm": of(engine=split),
    "two of vllm on a node": of(engine=split, max_replicas_per_node=1),
    "second": served(ServeJob.model_validate({"checkpoint": checkpoint,
        "more_models": [{"checkpoint": checkpoint, "model_name": "b"}]})
        ).more_models[0].gpus_per_replica,
    "training": trained(ClusterConfig()).gpus_per_worker,
    "training on cpus": trained(ClusterConfig(gpus_per_worker=0)).gpus_per_worker,
    "adapting": [devices().workers, devices().gpus_per_worker],
}
if not gpus:
    print(json.dumps(facts))
    sys.exit()
said = io.StringIO()
job = GenerateJob(checkpoint=checkpoint, prompts=CorpusSource(count=4), output=output,
    max_new_tokens=4, engine=size)
facts["answers"] = run_generation(job, Console(file=said, width=120), RayEngines).conversations
facts["engines"] = said.getvalue().splitlines()[0]
first = io.StringIO()
with contextlib.redirect_stderr(first):
    start(ServeJob.model_validate({"checkpoint": checkpoint, "engine": size, "port": free_port(),
        "model_name": "a", "replicas": 2, "cpus_per_replica": 0.5}))
facts["first line"] = first.getvalue().splitlines()[0]
facts["free"] = ray.available_resources().get("GPU", 0)
print(json.dumps(facts))
"""


def facts(checkpoint: Path, output: Path, gpus: int) -> dict[str, Any]:
    words = [sys.executable, "-c", SCRIPT, str(checkpoint), str(output), str(gpus)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.ray
@pytest.mark.long
def test_gpus_of_a_cluster_are_used(checkpoint: Path, tmp_path: Path):
    """One a replica, worker or engine. Guards a fleet that computes on CPUs beside idle
    GPUs, or share the first one that none has asked for."""
    found = facts(checkpoint, tmp_path / "own.jsonl", 3)
    assert found["default"] == [1, "auto"]
    assert found["cpus"] == [0, "cpu"]
    assert found["a part"] == [0.5, "auto"]
    assert found["engine on cpu"] == [0, "cpu"]
    assert found["engine on cuda"] == [1, "cuda"]
    assert found["vllm"] == [1, None]
    assert found["two of vllm"] == [2, None]
    assert "max_replicas_per_node has no effect" in found["two of vllm on a node"]
    assert found["second"] == 1
    assert (found["training"], found["training on cpus"]) == (1, 0)
    assert found["adapting"] == [3, 1]
    assert found["engines"] == "3 engines, each with 1 CPU, 1 GPU"
    assert found["answers"] == 4
    assert found["first line"] == "a: 2 replicas, each with 1 of the cluster's 3 GPUs"
    assert found["free"] == 1


@pytest.mark.ray
@pytest.mark.long
def test_without_gpus_replicas_are_on_cpus(checkpoint: Path, tmp_path: Path):
    found = facts(checkpoint, tmp_path / "own.jsonl", 0)
    assert found["default"] == [0, "cpu"]
    assert "engine.device 'cuda' and no GPU" in found["engine on cuda"]
    assert found["two of vllm"] == [0, None]
    assert found["training"] == 0


def test_how_many_each_gets():
    """What a job says counts; without a connection nothing is known of GPUs."""
    assert sentence("2 replicas", 0) == "2 replicas on CPUs; the cluster has no GPU"
    assert [gpus_each(asked, 2) for asked in (None, 0, 0.5, 2)] == [1, 0, 0.5, 2]
    assert [gpus_each(asked, 0) for asked in (None, 0, 0.5)] == [0, 0, 0.5]
    assert gpus_each(None, 2, workers=4) == 4
    assert served(ServeJob(checkpoint="a")).gpus_per_replica == 0
    assert trained(ClusterConfig()).gpus_per_worker == 0


def test_an_adaptation_leaves_the_gpus_to_the_cluster_that_serves():
    """Its file serves as well where there are GPUs as where there are none."""
    for given, wanted in ((None, None), (0, 0), (0.5, 0.5)):
        service = ServiceConfig(gpus_per_replica=given, port=20021)
        job = AdaptJob(name="a", model="m", service=service)
        table = service_table(job, Path("base"), Places(Path("run")))
        assert ServeJob.model_validate(table).gpus_per_replica == wanted
        assert ("gpus_per_replica" in table) == (given is not None)


def test_gpus_and_devices_that_contradict_each_other_are_refused():
    """As for `mars-ray generate`."""
    for device, gpus in (("cpu", 1), ("cuda", 0)):
        with pytest.raises(ValidationError, match=f"engine.device '{device}'"):
            ServeJob.model_validate(
                {"checkpoint": "a", "gpus_per_replica": gpus, "engine": {"device": device}}
            )
