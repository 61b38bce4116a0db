"""Learning rate, weight decay groups, and the job as the workers see it."""

import math
from pathlib import Path

import pytest
import torch
from train.small_jobs import make_job

from mars_ray.config import base
from mars_ray.config.inputs import FilesSource
from mars_ray.config.train import OptimizerConfig, TrainJob
from mars_ray.train.engine import learning_rate, make_optimizer
from mars_ray.train.plan import (
    absolute_files,
    identity,
    identity_hash,
    known_hashes,
    with_absolute_paths,
)


def test_learning_rate_by_hand():
    """Guards an off-by-one: a first step at rate 0 is wasted, a higher one than given diverges."""
    config = OptimizerConfig(learning_rate=1.0, warmup_share=0.2, final_share=0.1)
    rates = [learning_rate(config, step, 10) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 4 / 8)))
    assert rates[9] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert sorted(rates[2:], reverse=True) == rates[2:]


def test_learning_rate_without_warmup_and_of_one_step():
    """Guards a division by zero at the edges."""
    config = OptimizerConfig(learning_rate=0.5, warmup_share=0.0)
    assert learning_rate(config, 0, 1) == 0.5
    assert learning_rate(config.model_copy(update={"warmup_share": 0.9}), 0, 1) == 0.5


def test_weight_decay_is_for_matrices_only():
    """Guards decay on norms and biases, which shrinks what has no reason to be small."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    config = OptimizerConfig(learning_rate=1.0, weight_decay=0.1)
    optimizer = make_optimizer(module, config)
    decay = {
        p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert decay == {2: 0.1, 1: 0.0}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


def test_a_job_becomes_independent_of_the_working_directory(tmp_path, monkeypatch):
    """Guards relative paths in workers: Ray runs those in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    job = make_job(Path("model"), Path("out"))
    job = job.model_copy(
        update={
            "data": job.data.model_validate(
                {"train": {"type": "files", "paths": ["a/*.jsonl"]}, "cache_dir": "cache"}
            )
        }
    )
    absolute = with_absolute_paths(job)
    assert absolute.output_dir == str(tmp_path / "out")
    assert absolute.model.path == str(tmp_path / "model")
    assert absolute.data.train.paths == (str(tmp_path / "a/*.jsonl"),)
    assert absolute.data.cache_dir == str(tmp_path / "cache")


def test_files_of_the_package_are_found_from_anywhere(tmp_path, monkeypatch):
    """Guards `jobs/NAME` that passes the look at the inputs and is missing for the work."""
    monkeypatch.setattr(base, "_PACKAGE", tmp_path / "package")
    (tmp_path / "package" / "jobs").mkdir(parents=True)
    shipped = tmp_path / "package" / "jobs" / "rows.jsonl"
    shipped.touch()
    monkeypatch.chdir(tmp_path)
    absolute = absolute_files(FilesSource(paths=("jobs/rows.jsonl", "jobs/none.jsonl")))
    assert absolute.paths == (str(shipped), str(tmp_path / "jobs" / "none.jsonl"))


def test_a_hub_name_is_not_taken_for_a_path(tmp_path, monkeypatch):
    """Guards hub models: `Qwen/Qwen2.5-0.5B` must stay a name."""
    monkeypatch.chdir(tmp_path)
    job = make_job(Path("Qwen/Qwen2.5-0.5B"), Path("out"))
    assert with_absolute_paths(job).model.path == "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"log_every_steps": 7}, True),
        ({"cluster": {"workers": 2}}, True),
        ({"checkpoint": {"every_steps": 3, "keep": 1}}, True),
        ({"output_dir": "elsewhere"}, True),
        ({"seed": 1}, False),
        ({"precision": "bfloat16"}, False),
        ({"engine": {"type": "deepspeed"}}, False),
    ],
)
def test_identity_ignores_what_does_not_change_the_model(change, same):
    """Guards both mistakes: resuming another job's run, and refusing to move or watch a run."""
    job = make_job(Path("model"), Path("out"))
    other = TrainJob.model_validate(job.model_dump() | change)
    assert (identity(job) == identity(other)) is same
    assert (identity_hash(job) == identity_hash(other)) is same


def test_a_checkpoint_is_known_wherever_its_inputs_lie():
    """Guards checkpoints of a submitted job; and older ones, whose digest has the paths in it."""
    one, other = (make_job(Path(where) / "model", Path("out")) for where in ("/a", "/b"))
    assert identity_hash(one) == identity_hash(other)
    assert known_hashes(one)[0] == identity_hash(one)
    assert known_hashes(one)[1] != known_hashes(other)[1]
