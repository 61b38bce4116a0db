"""Tiny models as directories: one that MARS has trained, and one with a draft adapter."""

from dataclasses import replace
from pathlib import Path

import pytest
from decode.adapters import good_adapter, random_adapter
from decode.models import CARD, trained_model

from mars_ray.model.card import write_card
from mars_ray.model.directory import fingerprint
from mars_ray.model.draft_adapter import DraftAdapter, write_draft_adapter


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full MARS checkpoint: its mask token is trained."""
    directory = tmp_path_factory.mktemp("checkpoint")
    trained_model().save_pretrained(directory)
    write_card(directory, CARD)
    return directory


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a plain model, for adapters."""
    directory = tmp_path_factory.mktemp("base")
    trained_model().save_pretrained(directory)
    return directory


def _written(adapter: DraftAdapter, base: Path, directory: Path) -> Path:
    card = replace(adapter.card, base_fingerprint=fingerprint(base))
    write_draft_adapter(directory, replace(adapter, card=card))
    return directory


@pytest.fixture(scope="session")
def good(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with a head, most of whose drafts are right."""
    directory = tmp_path_factory.mktemp("adapters") / "good"
    return _written(good_adapter(trained_model()), base, directory)


@pytest.fixture(scope="session")
def wild(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of random weights in all layers: real rows would show any of it."""
    directory = tmp_path_factory.mktemp("adapters") / "wild"
    return _written(random_adapter(trained_model()), base, directory)
