"""A checkpoint on its way to where services load it from."""

import shutil
from pathlib import Path

import pytest

from mars_ray.config.model import PresetModel
from mars_ray.errors import ModelError
from mars_ray.model import export
from mars_ray.model.card import read_card
from mars_ray.model.create import create_model
from mars_ray.model.export import export_model
from mars_ray.model.source import Source, local_copy, pinned

WORDS = ["one two three four five six seven eight nine ten"] * 50


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A measured model, and a file beside it that is not to travel."""
    directory = tmp_path_factory.mktemp("made") / "mars"
    create_model(PresetModel(preset="tiny", vocab_size=300), lambda: WORDS, directory, seed=0)
    (directory / "frontier.json").write_text("{}")
    (directory / "optimizer.pt").write_bytes(b"a program")
    return directory


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_what_is_exported_can_be_loaded(made, tmp_path, prefix):
    """Guards an export that misses a file which only a service on another machine notices."""
    destination = f"{prefix}{tmp_path}/models/mars-1"
    written = export_model(Source(str(made)), destination, cache=str(tmp_path / "unused"))
    source, card = pinned(Source(destination))
    assert card == read_card(made)
    arrived = local_copy(source, str(tmp_path / "cache"))
    names = {path.name for path in arrived.iterdir()}
    assert names == {path.name for path in made.iterdir()} - {"optimizer.pt"}
    assert written.files == len(names)
    assert written.bytes == sum(path.stat().st_size for path in arrived.iterdir())


def test_a_place_that_is_taken_is_left_alone(made, tmp_path):
    """Guards weights that change under a service which is loading them."""
    destination = f"file://{tmp_path}/mars"
    export_model(Source(str(made)), destination, cache="")
    before = (tmp_path / "mars" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(ModelError, match="a place of its own"):
        export_model(Source(str(made)), destination, cache="")
    assert (tmp_path / "mars" / "model.safetensors").stat().st_mtime_ns == before


def test_an_export_that_is_cut_short_is_not_served(made, tmp_path, monkeypatch):
    """The card is what a service looks at first, and it comes last."""
    copy = export._copy

    def fails_at_weights(path, filesystem, target):
        if path.suffix == ".safetensors":
            raise OSError("the network is gone")
        copy(path, filesystem, target)

    monkeypatch.setattr(export, "_copy", fails_at_weights)
    with pytest.raises(ModelError, match="the network is gone"):
        export_model(Source(str(made)), str(tmp_path / "mars"), cache="")
    with pytest.raises(ModelError, match=r"has no mars\.json"):
        pinned(Source(f"file://{tmp_path}/mars"))


def test_secrets_of_a_uri_are_not_repeated(made):
    """Guards passwords in logs of jobs."""
    uri = "s3://user:secret@bucket/mars?endpoint_override=127.0.0.1:9&scheme=http&hidden=1"
    with pytest.raises(ModelError) as caught:
        export_model(Source(str(made)), uri, cache="")
    assert "secret" not in str(caught.value)
    assert "s3://bucket/mars" in str(caught.value)


def test_an_incomplete_checkpoint_is_refused(made, tmp_path):
    """Guards half a model in the store that all services load from."""
    broken = tmp_path / "broken"
    shutil.copytree(made, broken)
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ModelError, match="cut short"):
        export_model(Source(str(broken)), str(tmp_path / "mars"), cache="")
    assert not (tmp_path / "mars").exists()
