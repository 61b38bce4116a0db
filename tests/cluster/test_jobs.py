"""The documentation's jobs through the job server of a cluster of three nodes."""

import json
import re
import shutil
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from cluster.conftest import Cluster
from docs.commands import runs
from docs.small import small
from processes import family, titled

from mars_ray.cluster.machine import free_port

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1200)]

# At once: more would wait for the machine's cores and not for the cluster's.
JOBS = 3


@pytest.fixture(scope="module")
def trained(three_nodes: Cluster) -> str:
    """What a training job said, whose models are also where other jobs look for the demo's."""
    (command,) = runs("trained")
    said = three_nodes.submit(small(command)).stdout
    models = three_nodes.shared / "runs" / "gsm8k" / "models"
    shutil.copytree(models, three_nodes.shared / "runs" / "demo" / "models")
    return said


def test_a_cluster_has_its_nodes_and_asks_for_its_token(three_nodes):
    """Guards a dashboard which runs code for whoever asks, and nodes that did not join."""
    assert three_nodes.said["nodes"] == three_nodes.state.alive == 3
    stranger = three_nodes.environment | {"RAY_AUTH_TOKEN": "0" * 64}
    refused = subprocess.run(
        three_nodes.command("job", "list"), capture_output=True, text=True, env=stranger
    )
    assert refused.returncode != 0
    assert "token" in refused.stdout + refused.stderr


def test_training_runs_on_workers_and_streams_its_log(three_nodes, trained):
    """Guards jobs that only run on the machine they were written on."""
    model = three_nodes.shared / "runs" / "gsm8k" / "models" / "mars"
    assert (model / "mars.json").exists()
    assert "succeeded" in trained
    # The job's own last line, which came through the job server.
    result = [text for text in trained.splitlines() if text.startswith('{"')][-1]
    assert set(json.loads(result)["models"]) == {"ar", "mars"}


def test_data_of_the_checkout_goes_with_the_job(three_nodes):
    """Guards the first job that a reader submits, from where the data was put."""
    (command,) = runs("test_data_of_the_checkout_goes_with_the_job")
    three_nodes.submit(small(command))
    assert (three_nodes.checkout.directory / "runs/gsm8k/models/mars/mars.json").exists()


def test_the_other_jobs_run_to_their_ends(three_nodes, trained):
    """All that is no training, on models that a job made."""
    submitted(three_nodes, runs("test_the_other_jobs_run_to_their_ends"))
    shared = three_nodes.shared
    assert (shared / "runs" / "tune-demo" / "best.toml").exists()
    assert (shared / "runs" / "own-answers" / "demo.jsonl").exists()
    assert (shared / "runs" / "gsm8k" / "models" / "mars" / "frontier.json").exists()
    assert json.loads((shared / "runs" / "bench-demo.json").read_text())
    assert (shared / "runs" / "simulate-demo" / "report.html").exists()
    assert (shared / "models" / "mars-demo-1" / "mars.json").exists()


def test_training_for_gpus(three_nodes):
    """As it is submitted, but for the model, the data and the GPUs."""
    commands = runs("test_training_for_gpus")
    submitted(three_nodes, commands)
    directory = three_nodes.shared.parent
    cards = [*directory.glob("shared/runs/qwen*/models/*/mars.json")]
    cards += directory.glob("mnt/runs/7b/models/*/mars.json")
    assert len(cards) == 2 * len(commands)
    assert list((directory / "bucket").rglob("*.safetensors"))


def submitted(cluster: Cluster, commands: list[str]) -> None:
    """Some at a time, all to their ends."""
    with ThreadPoolExecutor(JOBS) as pool:
        for job in [pool.submit(cluster.submit, small(command)) for command in commands]:
            job.result()


def test_a_service_is_a_job(three_nodes, trained, tmp_path):
    """It answers on the node where Serve's proxy is, until the job is stopped."""
    (command,) = runs("test_a_service_is_a_job")
    trained_at = three_nodes.shared / "runs" / "gsm8k" / "models"
    shutil.copytree(trained_at, tmp_path / "runs" / "7b" / "models")
    port, log = free_port(), tmp_path / "log"
    here = placed(three_nodes, "/mnt/shared", tmp_path).checkout
    fitting = small(command, f"port={port}")
    submission = here.start(f"{three_nodes.export}\n{fitting}", log)
    wait_for(lambda: f"serving on http://127.0.0.1:{port}" in log.read_text(), 240)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=60) as reply:
        assert reply.status == 200
    (job,) = set(re.findall(r"raysubmit_\w+", log.read_text()))
    assert three_nodes.ray("job", "stop", job).returncode == 0
    submission.wait(60)


def placed(cluster: Cluster, place: str, directory: Path) -> Cluster:
    """The same with another directory for a place of the documentation."""
    places = cluster.checkout.places | {place: str(directory)}
    return replace(cluster, checkout=replace(cluster.checkout, places=places))


def test_a_job_that_fails_fails_its_submission(three_nodes, tmp_path):
    """Guards pipelines that go on with a model which was never made."""
    known = runs("test_the_other_jobs_run_to_their_ends")
    (command,) = (each for each in known if "jobs/export-demo.toml" in each)
    done = placed(three_nodes, "/shared", tmp_path).submit(command, expected=1)
    assert "there is no directory" in done.stdout + done.stderr


def test_a_job_that_is_stopped_leaves_no_workers(three_nodes, tmp_path):
    """Guards GPUs that stay taken after `ray job stop`."""
    shutil.copytree(three_nodes.shared / "data", tmp_path / "data")
    (command,) = runs("trained")
    options = "--submission-id=long --no-wait"
    command = command.replace(" -- ", f" {options} -- ", 1) + " stages.ar.steps=100000"
    placed(three_nodes, "/shared", tmp_path).submit(small(command))
    progress = tmp_path / "runs" / "gsm8k" / "stages" / "ar" / "metrics.jsonl"
    wait_for(lambda: progress.exists() and progress.read_text().strip(), 120)
    assert len(training_workers(three_nodes)) == 2
    stopped = three_nodes.ray("job", "stop", "long")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    wait_for(lambda: not training_workers(three_nodes), 30)
    assert "STOPPED" in three_nodes.ray("job", "status", "long").stdout.upper()


def training_workers(cluster: Cluster) -> list[psutil.Process]:
    """Processes of this cluster in which Ray Train's workers run."""
    below = [process for node in cluster.state.nodes for process in family(node.pid)]
    return titled(below, "RayTrainWorker")


def wait_for(is_so, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)
