"""A model of 2 layers, jobs that train it in seconds, and ranks that are local processes."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen2Config, Qwen2ForCausalLM

from mars_ray.config.train import TrainJob
from mars_ray.data.corpus import problems
from mars_ray.errors import MarsError
from mars_ray.model.create import ensure_mask_token, train_tokenizer
from mars_ray.model.load import save_model
from mars_ray.train.loop import StageOutcome
from mars_ray.train.metrics import MetricsReader
from mars_ray.train.plan import StagePlan, stage_plan, with_absolute_paths
from mars_ray.train.ranks import Ranks
from mars_ray.train.worker import train_stage

VOCABULARY = 320
# Ranks are forked from a process that has imported what they need, which takes seconds.
mp.get_context("forkserver").set_forkserver_preload(["mars_ray.train.worker"])


def make_model(
    directory: Path, *, hidden_size: int = 32, intermediate_size: int = 64, layers: int = 2
) -> Path:
    """A model directory with random weights and a tokenizer of the corpus."""
    texts = [part for p in problems("train", 200, 0) for part in (p.question, p.solution)]
    tokenizer = train_tokenizer(texts, VOCABULARY)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    model = Qwen2ForCausalLM(config)
    save_model(directory, model, tokenizer, ensure_mask_token(model, tokenizer))
    return directory


def make_job(model: Path, output_dir: Path, **sections: Any) -> TrainJob:
    """Both stages on a few problems of the corpus; `sections` replace whole top-level keys."""
    stage = {
        "steps": 20,
        "global_batch_size": 4,
        "eval_rows": 6,
        "optimizer": {"learning_rate": 5e-3, "warmup_share": 0.1},
    }
    job = {
        "name": "small",
        "output_dir": str(output_dir),
        "precision": "float32",
        "log_every_steps": 1,
        "model": {"type": "pretrained", "path": str(model)},
        "data": {
            "max_length": 128,
            "train": {"type": "corpus", "count": 64},
            "eval": {"type": "corpus", "split": "test", "count": 6},
        },
        "stages": {
            "ar": {**stage, "objective": {"type": "ar"}},
            "mars": {**stage, "objective": {"type": "mars"}},
        },
        "checkpoint": {"every_steps": 10},
    }
    return TrainJob.model_validate(job | sections)


def make_plan(job: TrainJob, model: Path, stage: str = "mars") -> StagePlan:
    """A stage that starts from `model`, in the run directory that the job gives it."""
    return stage_plan(with_absolute_paths(job), stage, model)


def run_alone(plan: StagePlan, resume_from: Path | None = None) -> StageOutcome:
    """The stage on one rank, in this process."""
    outcome = try_alone(plan, resume_from)
    assert isinstance(outcome, StageOutcome), outcome
    return outcome


def try_alone(plan: StagePlan, resume_from: Path | None = None) -> StageOutcome | MarsError:
    """The same, if it may fail."""
    return train_stage(plan, Ranks.current(torch.device("cpu")), resume_from, ignore_report)


def spawn(work: Callable[..., None], world_size: int, *args: Any) -> None:
    """Run `work(*args)` in processes that form a gloo group."""
    # They find each other by a file: a port that is free now may be another test's in a moment.
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(
            _start_rank,
            (world_size, Path(directory) / "store", work, args),
            nprocs=world_size,
            start_method="forkserver",
        )


def records(plan: StagePlan, kind: str = "train") -> list[dict[str, Any]]:
    """What the stage logged."""
    return [line for line in MetricsReader(plan.metrics_file).new() if line["kind"] == kind]


def losses(plan: StagePlan) -> list[float]:
    """The loss of every logged step."""
    return [line["loss"] for line in records(plan)]


def ignore_report(directory: Path, metrics: dict[str, float]) -> None:
    """Stands for Ray, which is told of every checkpoint."""


def _start_rank(
    rank: int, world_size: int, store: Path, work: Callable[..., None], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    work(*args)
    dist.destroy_process_group()
    # What is left are threads of libraries, and an interpreter that ends beside those may abort.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
