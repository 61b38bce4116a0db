r"""The page docs/start/on-a-cluster.md, from its first command to its last, with a worker and a
node killed on the way. With a real model, and what it took as a result:

STORY_MODEL=models/smollm2 STORY_RESULT=benchmarks/results/story.json \
    pytest -m long tests/cluster/test_story.py
"""

import json
import os
import shutil
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster.conftest import Cluster, started
from cluster.test_jobs import placed, training_workers, wait_for
from docs.commands import runs
from docs.small import small
from processes import family, titled
from train.small_jobs import make_model

from mars_ray.cluster.machine import free_port
from mars_ray.core.frontier import mode_label, read_frontier
from mars_ray.provenance import provenance
from mars_ray.train.metrics import MetricsReader

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(5400)]

MODEL, RESULT = os.environ.get("STORY_MODEL"), os.environ.get("STORY_RESULT")
ANSWERS_S = 600
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
minutes: dict[str, float] = {}


@contextmanager
def timed(step: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    minutes[step] = (time.monotonic() - began) / 60
    print(f"{step}: {minutes[step]:.1f} minutes")


def command(words: str, *more: str) -> str:
    """The page's line that has these words, small but with the real model."""
    (found,) = (each for each in runs("test_the_whole_page") if words in each)
    return found if MODEL else small(found, *more)


def test_the_whole_page(tmp_path: Path):
    """Guards what the platform is for, in one piece: each step reads what the one before left."""
    with timed("cluster"), started(tmp_path) as cluster:
        found = passed_through(cluster, tmp_path)
    if RESULT:
        result = {"minutes": minutes, **found, "provenance": provenance()}
        Path(RESULT).write_text(json.dumps(result, indent=1) + "\n")


def passed_through(cluster: Cluster, directory: Path) -> dict[str, Any]:
    """What the steps left."""
    runs_at = cluster.shared / "runs"
    checkout = cluster.checkout.directory
    source = Path(MODEL).absolute() if MODEL else make_model(directory / "made")
    (checkout / "models").mkdir(exist_ok=True)
    (checkout / "models" / "smollm2").symlink_to(source)
    if MODEL and GSM8K.exists():
        shutil.copytree(GSM8K, checkout / "data" / "gsm8k", dirs_exist_ok=True)
    cluster.submit(command("mkdir -p"))
    with timed("generate"):
        cluster.submit(command("mars_ray generate"), limit_s=3000)
    assert (runs_at / "own-answers" / "smollm2.jsonl").read_text().count("\n") > 4

    with timed("train"):
        log = directory / "train.log"
        job = cluster.checkout.start(f"{cluster.export}\n{command('mars_ray train')}", log)
        metrics = MetricsReader(runs_at / "smollm2" / "stages" / "mars" / "metrics.jsonl")
        killed = [kill_at(5, metrics, cluster, whole_node=False)]
        killed.append(kill_at(10, metrics, cluster, whole_node=True))
        assert job.wait(3000) == 0, log.read_text()[-3000:]
    assert cluster.state.alive == 2
    records = MetricsReader(metrics.path).new()
    starts = [each["step"] for each in records if each["kind"] == "start"]
    assert starts[0] == 0
    assert len(starts) == 1 + len(killed), starts
    trained = [each for each in records if each["kind"] == "train"]
    assert trained[-1]["loss"] < trained[0]["loss"]

    with timed("sweep"):
        sweep = result_of(cluster.submit(command("mars_ray tune"), limit_s=3000).stdout)
    assert (runs_at / "tune-smollm2" / "best.toml").exists()
    with timed("evaluate"):
        cluster.submit(command("mars_ray evaluate"), limit_s=3000)
    frontier = read_frontier(runs_at / "smollm2" / "models" / "mars")
    assert frontier

    port = free_port()
    there = placed(cluster, "http://127.0.0.1:8000", f"http://127.0.0.1:{port}")
    with timed("serve"):
        there.submit(command("mars_ray serve") + f" port={port}")
        wait_for(lambda: ready(port), ANSWERS_S)
    said = there.submit(command("Bread rises")).stdout
    assert json.loads(said)["choices"][0]["text"]
    with timed("scale"):
        load = there.checkout.start(command("seq 96"), directory / "load.log")
        wait_for(lambda: replicas(port) == 2, ANSWERS_S)
        assert load.wait(ANSWERS_S) == 0
    assert (
        "smollm2" in there.submit(command("mars-ray status") + f" http://127.0.0.1:{port}").stdout
    )
    assert there.submit(command("ray job logs")).stdout.count("serving on") == 1
    there.submit(command("ray job stop"))
    return {
        "killed": killed,
        "resumed_at": starts[1:],
        "tokens": trained[-1]["mask_tokens"],
        "loss": [trained[0]["loss"], trained[-1]["loss"]],
        "frontier": {
            mode_label(point.mode): [point.tokens_per_forward, point.agreement]
            for point in frontier.points
        },
        "trials": sweep["trials"],
    }


def kill_at(step: int, metrics: MetricsReader, cluster: Cluster, *, whole_node: bool) -> str:
    """Ends a worker, or the node under one, once the step is logged; says which."""
    wait_for(lambda: any(each.get("step", 0) >= step for each in metrics.new()), 1800)
    if not whole_node:
        training_workers(cluster)[-1].kill()
        return "worker"
    wait_for(lambda: len(training_workers(cluster)) == 2, 300)
    for node in cluster.state.nodes[1:]:
        process = psutil.Process(node.pid)
        below = family(node.pid)
        if titled(below, "RayTrainWorker"):
            for each in (*below, process):
                each.kill()
            return "node"
    raise AssertionError("no worker runs on a node that is not the head")


def result_of(log: str) -> dict:
    """A job's own last line."""
    return json.loads([line for line in log.splitlines() if line.startswith('{"')][-1])


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def replicas(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/mars/status", timeout=30) as reply:
        (model,) = json.load(reply)["data"]
        return model["replicas"]
