"""Tiny models as directories: one that MARS has trained, and one with a draft adapter."""

from dataclasses import replace
from pathlib import Path

import pytest
from decode.adapters import good_adapter, random_adapter
from decode.models import CARD, trained_model
from transformers import PreTrainedModel

from mars_ray.model.directory import fingerprint, write_card
from mars_ray.model.draft_adapter import DraftAdapter, Lora, write_draft_adapter

# vLLM's attention on CPUs wants heads of at least 32.
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture(scope="session")
def trained() -> PreTrainedModel:
    return trained_model(**WIDE)


@pytest.fixture(scope="session")
def checkpoint(trained: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full MARS checkpoint: its mask token is trained."""
    directory = tmp_path_factory.mktemp("checkpoint")
    trained.save_pretrained(directory)
    write_card(directory, CARD)
    return directory


@pytest.fixture(scope="session")
def base(trained: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a plain model, for adapters."""
    directory = tmp_path_factory.mktemp("base")
    trained.save_pretrained(directory)
    return directory


def _written(adapter: DraftAdapter, base: Path, directory: Path) -> Path:
    card = replace(adapter.card, base_fingerprint=fingerprint(base))
    write_draft_adapter(directory, replace(adapter, card=card))
    return directory


@pytest.fixture(scope="session")
def good(trained: PreTrainedModel, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with a head, most of whose drafts are right."""
    directory = tmp_path_factory.mktemp("adapters") / "good"
    return _written(good_adapter(trained), base, directory)


@pytest.fixture(scope="session")
def wild(trained: PreTrainedModel, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of random weights in all layers: real rows would show any of it."""
    directory = tmp_path_factory.mktemp("adapters") / "wild"
    return _written(random_adapter(trained), base, directory)


@pytest.fixture(scope="session")
def small_loras(
    trained: PreTrainedModel, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Two ordinary LoRAs in peft's format: they change answers, but not into noise."""
    directory = tmp_path_factory.mktemp("loras")
    made = []
    for seed in range(2):
        adapter = random_adapter(trained, seed=seed)
        lora = {name: Lora(down * 0.1, up) for name, (down, up) in adapter.lora.items()}
        made.append(_written(replace(adapter, lora=lora), base, directory / str(seed)))
    return made
