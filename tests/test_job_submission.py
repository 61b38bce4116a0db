"""A job file through Ray's real job server, as a platform team submits it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mars_ray.cluster.local import LocalCluster, Plan, down, up
from mars_ray.cluster.machine import free_port

ROOT = Path(__file__).parents[1]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """A cluster whose job server works beside other clusters of this machine.

    One that `ray.init` starts has the job agent at a fixed port, which only the first of them gets;
    and with a directory that all of them share, a job may find the wrong one.
    """
    # Not pytest's, because names of sockets may not be long.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        monkeypatch.setenv("RAY_TMPDIR", directory)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        state = Path(directory) / "cluster"
        yield up(Plan(1, 4, 200_000_000, free_port(), free_port()), state)
        down(state)


@pytest.mark.ray
@pytest.mark.long
def test_ray_job_submit_trains_and_reports_its_exit_code(cluster, tmp_path):
    """Guards jobs that only run on the machine they were written on: the working directory is
    uploaded, the driver runs on the cluster, a failure fails the submission."""
    output = tmp_path / "run"
    command = [
        str(Path(sys.executable).parent / "ray"),
        "job",
        "submit",
        "--address",
        cluster.dashboard,
        "--working-dir",
        str(_working_dir(tmp_path)),
        "--",
        sys.executable,
        "-m",
        "mars_ray",
        "train",
        "jobs/demo-train.toml",
        f"output_dir={output}",
    ]
    small = ["stages.ar.steps=3", "data.train.count=200", "data.eval.count=16"]
    done = _run([*command, *small])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (output / "models" / "ar" / "model.safetensors").exists()
    failed = _run([*command, "no_such_key=1"])
    assert failed.returncode != 0
    assert "unknown key 'no_such_key'" in failed.stdout + failed.stderr


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=240
    )


def _working_dir(tmp_path: Path) -> Path:
    """What a checkout holds, without environments and runs."""
    directory = tmp_path / "checkout"
    (directory / "jobs").mkdir(parents=True)
    (directory / "mars_ray").symlink_to(ROOT / "mars_ray")
    job = """
        kind = "train"
        name = "submitted"
        output_dir = "runs/submitted"
        precision = "float32"
        [model]
        type = "preset"
        preset = "tiny"
        vocab_size = 400
        [data]
        max_length = 256
        train = { type = "corpus", count = 200 }
        eval = { type = "corpus", split = "test", count = 16 }
        [stages.ar]
        objective = { type = "ar" }
        steps = 3
        global_batch_size = 4
        optimizer = { learning_rate = 1e-3 }
    """
    (directory / "jobs" / "demo-train.toml").write_text(job)
    return directory
