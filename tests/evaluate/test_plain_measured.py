"""What measures and writes answers takes a directory of Hugging Face's as it is."""

import io
import json
from pathlib import Path

import pytest
import torch
from generate.engines import InProcess
from model.toys import build
from rich.console import Console

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.evaluate import BenchJob, CorpusTask, EvaluateJob
from mars_ray.config.generate import GenerateJob
from mars_ray.config.inputs import CorpusSource
from mars_ray.config.modes import ConfidenceMode, ExactMode, JacobiMode
from mars_ray.errors import RequestError
from mars_ray.evaluate import bench
from mars_ray.evaluate.bench import run_bench
from mars_ray.evaluate.run import run_evaluation
from mars_ray.generate.run import run_generation
from mars_ray.model.directory import CARD_FILE

QUIET = Console(quiet=True)
SIZE = EngineConfig(max_batch=4, max_context=512, threads=1)


def downloaded(directory: Path, architecture: str) -> Path:
    """Random weights that wander, with room for the corpus' questions letter by letter."""
    model, tokenizer = build(architecture, 300)
    model.config.max_position_embeddings = 1024
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama", "mistral"])
def checkpoint(request, tmp_path_factory) -> Path:
    return downloaded(tmp_path_factory.mktemp("measured") / request.param, request.param)


def test_evaluation(checkpoint, tmp_path):
    """In `exact` and `jacobi`; what needs masks is refused before anything is measured."""
    settings = {
        "checkpoint": str(checkpoint),
        "task": CorpusTask(count=4),
        "max_new_tokens": 12,
        "engine": SIZE,
        "output_dir": str(tmp_path),
    }
    drafting = EvaluateJob(**settings, modes=(ConfidenceMode(),))
    with pytest.raises(RequestError, match="or give it a draft adapter"):
        run_evaluation(drafting, QUIET)
    assert not list(tmp_path.iterdir())
    found = run_evaluation(EvaluateJob(**settings, modes=(JacobiMode(),)), QUIET).frontier
    assert [point.label for point in found.points] == ["exact", "jacobi, 4 guesses"]
    assert found.points[1].identical == 1


def test_generation(checkpoint, tmp_path):
    """Its own answers; those that end hold no token that ends a turn."""
    job = GenerateJob(
        checkpoint=str(checkpoint),
        prompts=CorpusSource(count=6),
        output=str(tmp_path / "answers.jsonl"),
        sampling=Sampling(temperature=2.0, seed=1),
        max_new_tokens=100,
        engine=SIZE,
    )
    run_generation(job, QUIET, start=InProcess)
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert len(lines) == 6
    for line in lines:
        answer = json.loads(line)["messages"][-1]
        assert answer["role"] == "assistant"
        assert "<|im_end|>" not in answer["content"]
    assert not (checkpoint / CARD_FILE).exists()


@pytest.mark.slow
def test_the_benchmark(tmp_path):
    """Beside transformers, token for token."""
    checkpoint = downloaded(tmp_path / "mistral", "mistral")
    job = BenchJob(
        checkpoint=str(checkpoint),
        modes=(ExactMode(), JacobiMode()),
        batch_sizes=(1, 2),
        prompts=2,
        max_new_tokens=8,
        rounds=1,
        engine=SIZE,
    )
    cases = run_bench(job, Console(file=io.StringIO(), width=120))["cases"]
    assert [(case["batch"], case["label"]) for case in cases] == [
        (size, label) for size in (1, 2) for label in ("exact", "jacobi, 4 guesses", "transformers")
    ]
    assert {case["same_output"] for case in cases} == {1}


def test_what_needs_masks_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    """Guards a decoder that forbids all tokens where it means the mask."""
    checkpoint = downloaded(tmp_path / "mistral", "mistral")
    monkeypatch.setattr(bench, "load_engine", None)
    with pytest.raises(RequestError, match="or give it a draft adapter"):
        run_bench(BenchJob(checkpoint=str(checkpoint), modes=(ConfidenceMode(),)), QUIET)
