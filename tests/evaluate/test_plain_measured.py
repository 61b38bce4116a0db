"""What measures and writes answers takes a directory of Hugging Face's as it is."""

import io
import json
from pathlib import Path

import pytest
import torch
from model.toys import build
from rich.console import Console

from mars_ray.config.bench import BenchDecodeJob
from mars_ray.config.data import CorpusSource
from mars_ray.config.decode import EngineConfig, JacobiMode, Sampling, VerifiedMode
from mars_ray.config.evaluate import CorpusTask, EvaluateJob
from mars_ray.config.generate import GenerateJob
from mars_ray.errors import ConfigError, RequestError
from mars_ray.evaluate import bench_decode
from mars_ray.evaluate.bench_decode import run_bench_decode
from mars_ray.evaluate.run import run_evaluation
from mars_ray.generate import run_generation
from mars_ray.model.card import CARD_FILE

QUIET = Console(quiet=True)
SIZE = EngineConfig(max_batch=4, max_context=512, threads=1)


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama", "mistral"])
def checkpoint(request, tmp_path_factory) -> Path:
    """Random weights that wander, with room for the corpus' questions letter by letter."""
    directory = tmp_path_factory.mktemp("measured") / request.param
    model, tokenizer = build(request.param, 300)
    model.config.max_position_embeddings = 1024
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_evaluation(checkpoint, tmp_path):
    """In `exact` and `jacobi`; what needs drafts is refused before anything is measured."""
    settings = {
        "checkpoint": str(checkpoint),
        "task": CorpusTask(count=4),
        "max_new_tokens": 12,
        "engine": SIZE,
        "output_dir": str(tmp_path),
    }
    drafting = EvaluateJob(**settings, modes=(VerifiedMode(),))
    with pytest.raises(RequestError, match="or give it a draft adapter"):
        run_evaluation(drafting, QUIET)
    assert not list(tmp_path.iterdir())
    found = run_evaluation(EvaluateJob(**settings, modes=(JacobiMode(),)), QUIET).frontier
    assert [point.label for point in found.points] == ["exact", "jacobi, 4 guesses"]
    assert found.points[1].identical == 1


def test_generation(checkpoint, tmp_path):
    """Its own answers, to their ends."""
    job = GenerateJob(
        checkpoint=str(checkpoint),
        prompts=CorpusSource(count=6),
        output=str(tmp_path / "answers.jsonl"),
        sampling=Sampling(temperature=2.0, seed=1),
        max_new_tokens=100,
        engine=SIZE,
    )
    done = run_generation(job, QUIET)
    assert done.conversations + done.left_out == 6
    assert done.conversations > 0
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    for line in lines:
        answer = json.loads(line)["messages"][-1]
        assert answer["role"] == "assistant"
        assert "<|im_end|>" not in answer["content"]
    assert not (checkpoint / CARD_FILE).exists()


@pytest.mark.slow
def test_the_decoding_benchmark(checkpoint):
    """Beside transformers, token for token."""
    settings = {
        "checkpoint": str(checkpoint),
        "modes": [{"type": "exact"}, {"type": "jacobi"}],
        "peers": ["transformers"],
        "batch_sizes": (1, 2),
        "prompts": 2,
        "max_new_tokens": 8,
        "max_context": 512,
        "repeats": 1,
        "threads": 1,
    }
    result = run_bench_decode(
        BenchDecodeJob.model_validate(settings), Console(file=io.StringIO(), width=120)
    )
    assert {case["same_output"] for case in result["cases"]} == {1}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"modes": [{"type": "verified"}]}, RequestError, "or give it a draft adapter"),
        ({"lockstep": [{"cache": "none"}]}, ConfigError, "lockstep needs a model that `mars-ray t"),
    ],
)
def test_what_needs_masks_is_refused_before_any_peer_starts(
    checkpoint, changes, error, message, monkeypatch
):
    """Guards a decoder that forbids all tokens where it means the mask."""
    monkeypatch.setattr(bench_decode, "_running", None)
    settings = {"checkpoint": str(checkpoint), "modes": [{"type": "exact"}], "max_context": 512}
    with pytest.raises(error, match=message):
        run_bench_decode(BenchDecodeJob.model_validate(settings | changes), QUIET)
