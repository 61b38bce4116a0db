"""A draft adapter from a job to a directory that decoding reads, on Ray Train."""

import json
from pathlib import Path

import pytest
from train.draft_jobs import draft_job, make_plain_model

from mars_ray.config.train import TrainJob
from mars_ray.model.draft_adapter import read_draft_adapter
from mars_ray.train.run import run_training

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]

STEPS = 30


def two_stages(model: Path, output_dir: Path) -> TrainJob:
    """Two workers; the second stage has deeper blocks."""
    content = draft_job(model, output_dir, stage={"steps": STEPS}).model_dump()
    first = content["stages"].pop("draft")
    deeper = {"type": "draft", "block_size": {"type": "constant", "size": 6}, "grids": 3}
    content["stages"] = {"four": first, "six": first | {"objective": deeper}}
    content["cluster"] |= {"workers": 2, "cpus_per_worker": 0.5, "threads_per_worker": 1}
    return TrainJob.model_validate(content)


def test_a_job_ends_in_an_adapter(tmp_path):
    """Guards the whole way: two workers, a stage that goes on from the one before, an export that
    is read against the base, and a base that is used where it lies."""
    model = make_plain_model(tmp_path / "base")
    job = two_stages(model, tmp_path / "run")
    result = run_training(job)
    assert list(result.models) == ["four", "six"]
    adapters = [read_draft_adapter(path, model) for path in result.models.values()]
    assert [adapter.card.depths for adapter in adapters] == [4, 6]
    assert not (tmp_path / "run/initial").exists()
    told = adapters[1].card.training
    assert told["stage"] == "six"
    assert told["started_from"]["mask_tokens"] == adapters[0].card.training["mask_tokens"] > 0
    summary = json.loads((result.models["six"] / "training.json").read_text())
    assert summary["metrics"] == result.metrics["six"]
    first, second = (result.metrics[name]["eval_row_loss"] for name in ("four", "six"))
    assert second < first
    assert run_training(job) == result
