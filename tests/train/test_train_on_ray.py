"""Stages on Ray Train: end to end, through a killed worker, and through Ctrl-C."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import family, titled
from train.small_jobs import make_job, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from mars_ray.config.train import TrainJob
from mars_ray.errors import TrainingError
from mars_ray.model.directory import read_card
from mars_ray.train.checkpoint import CheckpointStore
from mars_ray.train.metrics import MetricsReader
from mars_ray.train.run import run_training

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

# So many steps that a signal comes in the middle, and few enough to take seconds.
STEPS = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "initial")


def job_of(model: Path, output_dir: Path, *stages: str) -> TrainJob:
    """Two workers; a checkpoint every 50 steps."""
    job = make_job(model, output_dir).model_dump()
    job["stages"] = {name: job["stages"][name] | {"steps": STEPS} for name in stages}
    job |= {"cluster": {"workers": 2, "cpus_per_worker": 0.5, "threads_per_worker": 1}}
    job |= {"checkpoint": {"every_steps": 50, "keep": 1}}
    return TrainJob.model_validate(job)


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    """Both stages without a disturbance: (job, result)."""
    job = job_of(model, tmp_path_factory.mktemp("undisturbed") / "run", "ar", "mars")
    return job, run_training(job)


def curve(output_dir: Path | str, stage: str = "ar") -> dict[int, float]:
    """The loss of each step, as the metrics file has it at the end."""
    path = Path(output_dir) / "stages" / stage / "metrics.jsonl"
    return {r["step"]: r["loss"] for r in MetricsReader(path).new() if r["kind"] == "train"}


def when_at_step(output_dir: Path, step: int, act: Callable[[], None]) -> threading.Thread:
    """Calls `act` from a thread as soon as that step of the first stage has been logged."""

    def watch() -> None:
        reader = MetricsReader(output_dir / "stages" / "ar" / "metrics.jsonl")
        while not any(record["step"] >= step for record in reader.new()):
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def kill_one_worker() -> None:
    workers = titled(family(os.getpid()), "RayTrainWorker")
    assert len(workers) == 2
    workers[1].kill()


def test_both_stages_end_to_end(undisturbed, capfd, monkeypatch):
    """Guards the whole way: two workers, two stages, exported models that any tool loads."""
    job, result = undisturbed
    assert list(result.models) == ["ar", "mars"]
    assert curve(job.output_dir)[STEPS] < 0.7 * curve(job.output_dir)[1]
    depths = [read_card(path).block_size for path in result.models.values()]
    assert depths == [0, 4]
    assert result.metrics["mars"]["eval_tokens_per_forward"] > 1.0
    assert result.seconds["ar"] > 0
    loaded = AutoModelForCausalLM.from_pretrained(result.models["mars"])
    prompt = AutoTokenizer.from_pretrained(result.models["mars"])("Tom has 3", return_tensors="pt")
    assert torch.isfinite(loaded(**prompt).logits).all()
    summary = json.loads((result.models["mars"] / "training.json").read_text())
    assert summary["metrics"] == result.metrics["mars"]
    # Kept by count: one checkpoint a stage.
    for stage in ("ar", "mars"):
        kept = [path.name for path in (Path(job.output_dir) / "stages" / stage).glob("step_*")]
        assert kept == [f"step_{STEPS:08d}"]
    # A finished job starts no workers.
    monkeypatch.delattr("mars_ray.train.run.fit_stage")
    assert run_training(job) == result


def test_a_killed_worker_does_not_change_the_result(model, undisturbed, tmp_path):
    """Guards recovery: after kill -9 of a worker the run goes on by itself, to the same loss."""
    job = job_of(model, tmp_path / "run", "ar")
    killer = when_at_step(tmp_path / "run", 110, kill_one_worker)
    run_training(job)
    killer.join(timeout=5)
    records = MetricsReader(tmp_path / "run/stages/ar/metrics.jsonl").new()
    starts = [record["step"] for record in records if record["kind"] == "start"]
    assert starts == [0, 100], "the run was not disturbed where it should have been"
    assert curve(job.output_dir) == curve(undisturbed[0].output_dir)


@pytest.mark.long
def test_a_copy_that_fails_is_told_and_training_goes_on(model, undisturbed, tmp_path, capfd):
    """Guards a run against its object store (ray#47939), which is away for its first checkpoint."""
    stored = tmp_path / "stored"
    stored.write_text("not mounted")
    job = job_of(model, tmp_path / "run", "ar")
    settings = job.checkpoint.model_copy(update={"storage_path": f"file://{stored}"})
    mount = when_at_step(tmp_path / "run", 60, stored.unlink)
    run_training(job.model_copy(update={"checkpoint": settings}))
    mount.join(timeout=5)
    assert curve(job.output_dir) == curve(undisturbed[0].output_dir)
    assert CheckpointStore(f"file://{stored}", "ar").steps() == {STEPS}
    said = capfd.readouterr()
    assert "checkpoint.storage_path: cannot copy step_00000050" in said.out + said.err


@pytest.mark.long
def test_ctrl_c_leaves_a_checkpoint_and_the_same_command_goes_on(model, undisturbed, tmp_path):
    """Guards Ctrl-C: neither an aborted run nor lost steps."""
    job = job_of(model, tmp_path / "run", "ar")
    before = signal.getsignal(signal.SIGINT)
    when_at_step(tmp_path / "run", 60, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(
        TrainingError, match=r"stopped at step [6-9]\d of 150.*run the same command again"
    ):
        run_training(job)
    assert not (tmp_path / "run/models").exists()
    assert signal.getsignal(signal.SIGINT) is before
    run_training(job)
    assert curve(job.output_dir) == curve(undisturbed[0].output_dir)
