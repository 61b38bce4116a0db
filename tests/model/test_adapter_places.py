"""Draft adapters from directories, stores and the hub: pinned, whole, and told apart."""

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from model.small_hub import COMMIT, NAME, hub
from safetensors.torch import load_file, save_file

from mars_ray.errors import ModelError
from mars_ray.model.draft_adapter import (
    DraftAdapter,
    DraftCard,
    read_draft_card,
    write_draft_adapter,
)
from mars_ray.model.places import adapter_name, local_adapter, pinned_adapter

DEPTHS = 3


@pytest.fixture
def made(tmp_path) -> Path:
    card = DraftCard(depths=DEPTHS, base="a model", base_fingerprint="00")
    directory = tmp_path / "store" / "adapter"
    write_draft_adapter(directory, DraftAdapter(card, torch.ones(DEPTHS, 8), {}, None))
    return directory


def test_a_directory_is_pinned_by_its_whole_path(made, monkeypatch):
    """Guards a replica elsewhere that looks for the path below its own directory; an @ is part of
    a directory's name if there is such a directory."""
    monkeypatch.chdir(made.parent)
    made.rename(made.parent / "one@two")
    name, card = pinned_adapter("one@two")
    assert name == str(made.parent / "one@two")
    assert card.depths == DEPTHS
    assert local_adapter(name, cache="") == made.parent / "one@two"


def test_the_hub_is_asked_once_and_then_for_a_commit(made, tmp_path, monkeypatch):
    """Replicas that start later get the same, and what is said about it names it as users do."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub(made) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        for name in (NAME, f"{NAME}@main"):
            pinned, card = pinned_adapter(name)
            assert (pinned, card.depths) == (f"{NAME}@{COMMIT}", DEPTHS)
        directory = local_adapter(pinned, cache="")
        assert read_draft_card(directory) == card
        assert adapter_name(pinned, directory).startswith(f"{NAME}@")


def test_a_store_gives_a_whole_copy_or_none(made, tmp_path):
    """Of a truncated file nothing is kept, so that the next try is a new one."""
    uri, cache = f"file://{made}", tmp_path / "cache"
    name, card = pinned_adapter(uri)
    assert (name, card.depths) == (uri, DEPTHS)
    copy = local_adapter(uri, str(cache))
    assert copy.parent == cache
    assert adapter_name(uri, copy) == adapter_name(str(made), made)
    weights = made / "draft.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match="damaged"):
        local_adapter(uri, str(cache))
    assert {path for path in cache.iterdir() if path.suffix == ""} == {copy}


def test_another_adapter_at_the_same_place_has_another_name(made):
    """By its weights and its card; other files beside it, as a frontier, change nothing."""
    first = adapter_name(str(made), made)
    assert first.startswith("store/adapter@")
    (made / "frontier.json").write_text("{}")
    assert adapter_name(str(made), made) == first
    weights = load_file(made / "draft.safetensors")
    save_file({key: value + 1 for key, value in weights.items()}, made / "draft.safetensors")
    assert adapter_name(str(made), made) != first


def test_secrets_of_a_place_are_not_part_of_a_name(made):
    """Guards a password in replies and metrics."""
    name = adapter_name("s3://KEY:SECRET@bucket/adapters/one?endpoint_override=minio", made)
    assert name.startswith("adapters/one@")
    assert "SECRET" not in name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "has format 2"),
        ({"depths": None}, "not the card"),
        (None, "no draft adapter"),
    ],
)
def test_what_is_no_adapter_is_said_by_its_own_name(made, change, said):
    """Not by that of the copy that was looked at."""
    card = made / "draft.json"
    if change is None:
        card.unlink()
    else:
        table = json.loads(card.read_text()) | change
        card.write_text(json.dumps({key: v for key, v in table.items() if v is not None}))
    with pytest.raises(ModelError, match=said) as caught:
        pinned_adapter(f"file://{made}")
    assert f"file://{made}" in str(caught.value)


def test_a_directory_that_is_not_here_is_said_with_the_node(tmp_path):
    """As for checkpoints: it may be on another machine."""
    with pytest.raises(ModelError, match="storage that all nodes share"):
        local_adapter(str(tmp_path / "nowhere"), cache="")
