"""Job files through the job server of a cluster of three nodes, by the lines of jobs/README.md."""

import json
import shlex
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from cluster.conftest import Cluster
from job_manifests import SUBMISSIONS

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

TRAIN = [
    "model.preset=tiny",
    "model.vocab_size=400",
    "data.max_length=256",
    "data.train={type='corpus', count=200}",
    "data.eval={type='corpus', split='test', count=8}",
    "stages.ar.steps=3",
    "stages.mars.steps=3",
    "log_every_steps=1",
]
EVALUATE = [
    "task={type='corpus', count=4}",
    "modes=[{type='verified'}]",
    "max_new_tokens=8",
    "engine.max_context=256",
]
BENCH = ["peers=[]", "lockstep=[]", "modes=[{type='exact'}]", "batch_sizes=[1]", "prompts=1"]
BENCH += ["repeats=1", "max_new_tokens=4"]
SIMULATE = ["policies=['lossless']", "seeds=[0]", "cluster.kills=[{at_s=30}]"]
SIMULATE += ["traces.flash.from_s=20", "traces.flash.to_s=40", "traces.flash.duration_s=60"]


@pytest.fixture(scope="module")
def trained(three_nodes: Cluster) -> tuple[Path, str]:
    """Storage that all nodes see, with a model in it; and what its training said."""
    shared = three_nodes.directory / "shared"
    done = three_nodes.ray(*line("train-gsm8k", shared, *TRAIN))
    assert done.returncode == 0, done.stdout + done.stderr
    return shared, done.stdout


def line(job: str, shared: Path, *overrides: str, options: tuple[str, ...] = ()) -> list[str]:
    """Of jobs/README.md, without its first word, on another storage and smaller."""
    (submission,) = (entry for entry in SUBMISSIONS if entry.job == job)
    words = shlex.split(submission.line.replace("/shared", str(shared)))[1:]
    place = words.index("--")
    return [*words[:place], *options, *words[place:], *overrides]


def test_a_cluster_has_its_nodes_and_asks_for_its_token(three_nodes):
    """Guards a dashboard which runs code for whoever asks, and nodes that did not join."""
    assert three_nodes.said["nodes"] == three_nodes.state.alive == 3
    stranger = three_nodes.environment | {"RAY_AUTH_TOKEN": "0" * 64}
    refused = subprocess.run(
        three_nodes.command("job", "list"), capture_output=True, text=True, env=stranger
    )
    assert refused.returncode != 0
    assert "token" in refused.stdout + refused.stderr


def test_training_runs_on_workers_and_streams_its_log(trained):
    """Guards jobs that only run on the machine they were written on."""
    shared, said = trained
    assert (shared / "runs" / "gsm8k" / "models" / "mars" / "mars.json").exists()
    assert "succeeded" in said
    # The job's own last line, which came through the job server.
    result = [text for text in said.splitlines() if text.startswith('{"')][-1]
    assert set(json.loads(result)["models"]) == {"ar", "mars"}


def test_the_other_jobs_run_to_their_ends(three_nodes, trained):
    """Evaluate, bench, simulate and export, at the same time, on a model that a job made."""
    shared, _ = trained
    model = f"checkpoint={shared}/runs/gsm8k/models/mars"
    lines = {
        "evaluate": line("evaluate-gsm8k", shared, *EVALUATE),
        "bench": line("bench-decode-demo", shared, model, *BENCH),
        "simulate": line("simulate-kills", shared, *SIMULATE),
        "export": line("export-demo", shared, model),
    }
    with ThreadPoolExecutor(len(lines)) as pool:
        jobs = {name: pool.submit(three_nodes.ray, *words) for name, words in lines.items()}
    for name, job in jobs.items():
        done = job.result()
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
    assert (shared / "runs" / "gsm8k" / "models" / "mars" / "frontier.json").exists()
    assert json.loads((shared / "runs" / "bench-decode-demo.json").read_text())
    assert (shared / "runs" / "simulate-kills" / "report.html").exists()
    assert (shared / "models" / "mars-demo-1" / "mars.json").exists()


def test_a_job_that_fails_fails_its_submission(three_nodes, tmp_path):
    """Guards pipelines that go on with a model which was never made."""
    missing = f"checkpoint={tmp_path}/nowhere"
    done = three_nodes.ray(*line("export-demo", tmp_path, missing))
    assert done.returncode == 1
    assert "there is no directory" in done.stdout + done.stderr


def test_a_job_that_is_stopped_leaves_no_workers(three_nodes, tmp_path):
    """Guards GPUs that stay taken after `ray job stop`."""
    options = ("--submission-id=long", "--no-wait")
    steps = "stages.ar.steps=100000"
    submitted = three_nodes.ray(*line("train-gsm8k", tmp_path, *TRAIN, steps, options=options))
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    progress = tmp_path / "runs" / "gsm8k" / "stages" / "ar" / "metrics.jsonl"
    wait_for(lambda: progress.exists() and progress.read_text().strip(), 120)
    assert len(training_workers(three_nodes)) == 2
    stopped = three_nodes.ray("job", "stop", "long")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    wait_for(lambda: not training_workers(three_nodes), 30)
    assert "STOPPED" in three_nodes.ray("job", "status", "long").stdout.upper()


def training_workers(cluster: Cluster) -> list[psutil.Process]:
    """Processes of this cluster in which Ray Train's workers run."""
    below = [
        process
        for node in cluster.state.nodes
        for process in psutil.Process(node.pid).children(recursive=True)
    ]
    return [process for process in below if "RayTrainWorker" in title(process)]


def title(process: psutil.Process) -> str:
    """Empty if it has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def wait_for(is_so, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)
