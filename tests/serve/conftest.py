"""A tiny model with random weights, and the API over an engine that runs it."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient
from serve.asking import load_server, wait_until_free
from serve.real_port import served
from transformers import PreTrainedModel

from mars_ray.config.decode import EngineConfig
from mars_ray.config.inputs import PresetModel
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.model.create import create_model
from mars_ray.model.directory import read_card
from mars_ray.model.load import load_model, load_tokenizer, save_model
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.replica.llm_server import LLMServer

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
WORDS = [*NUMBERS, "Grüße", "你好", "😀"]


def _texts() -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=8)) for _ in range(200)]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not trained at all: its masks draft nonsense, which `verified` has to survive."""
    return _made(tmp_path_factory.mktemp("serve") / "tiny", seed=0)


@pytest.fixture(scope="session")
def second_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one that says other things."""
    return _made(tmp_path_factory.mktemp("serve") / "tiny", seed=1)


def _made(directory: Path, seed: int) -> Path:
    create_model(PresetModel(preset="tiny", vocab_size=330), _texts, directory, seed=seed)
    model, tokenizer = load_model(directory, dtype=torch.float32), load_tokenizer(directory)
    _make_talkative(model, tokenizer.all_special_ids)
    save_model(directory, model, tokenizer, replace(read_card(directory), block_size=4))
    return directory


def _make_talkative(model: PreTrainedModel, special_ids: list[int]) -> None:
    """Random weights repeat one token for ever, as their head is their embedding; these wander.

    Greedy answers hold no special token, so they never end by themselves; some tests need that
    they go on for longer than so small a model is made for.
    """
    model.config.max_position_embeddings = 1 << 15
    model.config.tie_word_embeddings = False
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    torch.manual_seed(1)
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
    with torch.no_grad():
        head.weight[special_ids] = 0
        for layer in model.base_model.layers:
            for weight in layer.parameters():
                if weight.ndim == 2:
                    weight.mul_(3)


@pytest.fixture(scope="session")
def job(checkpoint: Path) -> ServeJob:
    return ServeJob(
        checkpoint=str(checkpoint),
        engine=EngineConfig(max_batch=4, max_context=160, device="cpu", threads=1),
        limits=Limits(body_bytes=4000, new_tokens=100, waiting_requests=2),
    )


@pytest.fixture(scope="session")
def text_engine(job: ServeJob) -> Iterator[LLMServer]:
    engine = load_server(job)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def roomy_url(job: ServeJob) -> Iterator[str]:
    """On a real port, with room for the description of a tool, a token for almost every letter."""
    sizes = job.engine.model_copy(update={"max_context": 1200})
    limits = Limits(new_tokens=300)
    roomy = job.model_copy(update={"engine": sizes, "limits": limits})
    engine = load_server(roomy)
    engine.start()
    with served(build_api(roomy, {"tiny": engine})) as url:
        yield url
    wait_until_free(engine)
    engine.stop()


@pytest.fixture(scope="session")
def client(job: ServeJob, text_engine: LLMServer) -> TestClient:
    return TestClient(build_api(job, {"tiny": text_engine}), raise_server_exceptions=False)
