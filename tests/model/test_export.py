"""A checkpoint on its way to where services load it from."""

import json
import shutil
from pathlib import Path

import pytest
from model.small_s3 import bucket

from mars_ray.config.inputs import PresetModel
from mars_ray.errors import ModelError
from mars_ray.model.create import create_model
from mars_ray.model.directory import PLAIN, read_card
from mars_ray.model.places import config_of, export_model, local_copy, pinned
from mars_ray.storage import copies
from mars_ray.storage.place import Place, shown

WORDS = ["one two three four five six seven eight nine ten"] * 50


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A measured model, and a file beside it that is not to travel."""
    directory = tmp_path_factory.mktemp("made") / "mars"
    create_model(PresetModel(preset="tiny", vocab_size=300), lambda: WORDS, directory, seed=0)
    (directory / "frontier.json").write_text("{}")
    (directory / "optimizer.pt").write_bytes(b"a program")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (directory / "onnx").mkdir()
    (directory / "onnx" / "config.json").write_text("{}")
    return directory


def names_of(directory: Path) -> set[str]:
    """Its files, those of subdirectories too."""
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


NOT_TO_TRAVEL = {"optimizer.pt", "onnx/config.json"}


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_what_is_exported_can_be_loaded(made, tmp_path, prefix):
    """Guards an export that misses a file which only a service on another machine notices."""
    destination = f"{prefix}{tmp_path}/models/mars-1"
    written = export_model(Place(str(made)), destination, cache=str(tmp_path / "unused"))
    source, card = pinned(Place(destination))
    assert card == read_card(made)
    arrived = local_copy(source, str(tmp_path / "cache"))
    names = names_of(arrived)
    assert names == names_of(made) - NOT_TO_TRAVEL
    assert "additional_chat_templates/tool_use.jinja" in names
    assert written["files"] == len(names)
    assert written["bytes"] == sum((arrived / name).stat().st_size for name in names)


def test_a_place_is_shown_as_it_is_but_for_its_secrets():
    """Guards a directory of a strange name that is told as an object store's."""
    assert shown("s3://ann:secret@bucket/mars?region=x") == "s3://bucket/mars"
    assert shown("s3:/bucket/mars") == "s3:/bucket/mars"
    assert shown("s3:/ann:secret@bucket/mars") == "s3:/bucket/mars"
    assert shown("models/a@b/mars") == "models/a@b/mars"


def test_a_place_that_is_taken_is_left_alone(made, tmp_path):
    """Guards weights that change under a service which is loading them."""
    destination = f"file://{tmp_path}/mars"
    export_model(Place(str(made)), destination, cache="")
    before = (tmp_path / "mars" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(ModelError, match="a place of its own"):
        export_model(Place(str(made)), destination, cache="")
    assert (tmp_path / "mars" / "model.safetensors").stat().st_mtime_ns == before


def test_an_export_that_is_cut_short_is_not_served(made, tmp_path, monkeypatch):
    """Card and configuration are what a service looks at first, and they come last."""
    copy = copies.copy_files

    def fails_at_weights(source, *options, **sizes):
        if source.endswith(".safetensors"):
            raise OSError("the network is gone")
        copy(source, *options, **sizes)

    monkeypatch.setattr(copies, "copy_files", fails_at_weights)
    with pytest.raises(ModelError, match="the network is gone"):
        export_model(Place(str(made)), str(tmp_path / "mars"), cache="")
    with pytest.raises(ModelError, match=r"neither mars\.json nor config\.json"):
        pinned(Place(f"file://{tmp_path}/mars"))


def cut_short(made: Path, destination: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export whose last file does not arrive."""
    copy = copies.copy_files

    def fails_at_the_last(source, *options, **sizes):
        if source.endswith("/config.json"):
            raise OSError("the network is gone")
        copy(source, *options, **sizes)

    with monkeypatch.context() as patch:
        patch.setattr(copies, "copy_files", fails_at_the_last)
        with pytest.raises(ModelError, match="the network is gone"):
            export_model(Place(str(made)), destination, cache="")


@pytest.mark.parametrize("is_trained", [True, False])
def test_what_was_cut_short_at_the_end_is_no_model(made, tmp_path, monkeypatch, is_trained):
    """Guards a trained model that is served as a plain one until its card is there, and a plain one
    whose weights are not."""
    source = Path(shutil.copytree(made, tmp_path / "source"))
    if not is_trained:
        (source / "mars.json").unlink()
    cut_short(source, str(tmp_path / "mars"), monkeypatch)
    place = Place(f"file://{tmp_path}/mars")
    with pytest.raises(ModelError, match=r"no config\.json|neither mars\.json nor config\.json"):
        config_of(pinned(place)[0])
    export_model(Place(str(source)), str(tmp_path / "mars"), cache="")
    assert config_of(place).model_type == "qwen2"
    assert pinned(place)[1] == (read_card(made) if is_trained else PLAIN)


@pytest.mark.parametrize("store", ["file", "s3"])
def test_an_export_that_was_cut_short_is_made_again(made, tmp_path, monkeypatch, store):
    """Guards a retried job that needs somebody to clean up first."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "password")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with bucket(tmp_path) as (options, _):
        places = {"file": f"file://{tmp_path}/mars", "s3": f"s3://bucket/mars{options}"}
        cut_short(made, places[store], monkeypatch)
        written = export_model(Place(str(made)), places[store], cache="")
    names = names_of(tmp_path / "mars")
    assert names == names_of(made) - NOT_TO_TRAVEL
    assert written["files"] == len(names)


@pytest.mark.parametrize("name", ["model.safetensors", "mars.json", "config.json"])
def test_a_file_that_arrives_short_can_be_exported_again(made, tmp_path, monkeypatch, name):
    """Guards a place that is taken by a file without its end, though no service can load it."""

    def shorter(source, target, *_, **__):
        data = Path(source).read_bytes()
        Path(target).write_bytes(data[:-1] if Path(source).name == name else data)

    destination = tmp_path / "mars"
    with monkeypatch.context() as patch:
        patch.setattr(copies, "copy_files", shorter)
        with pytest.raises(ModelError, match=r"arrived with \d+ bytes; export again$"):
            export_model(Place(str(made)), str(destination), cache="")
    assert not (destination / name).exists()
    export_model(Place(str(made)), str(destination), cache="")
    assert (destination / name).read_bytes() == (made / name).read_bytes()


def test_files_of_two_models_are_not_mixed(made, tmp_path, monkeypatch):
    """Guards weights in one file beside those in shards, of which loading takes the first."""
    destination = tmp_path / "mars"
    cut_short(made, str(destination), monkeypatch)
    sharded = shutil.copytree(made, tmp_path / "sharded")
    (sharded / "model.safetensors").rename(sharded / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="a place of its own"):
        export_model(Place(str(sharded)), str(destination), cache="")
    assert not (destination / "model-1.safetensors").exists()


@pytest.mark.parametrize("name", ["config.json", "notes", "model.safetensors"])
def test_a_place_with_files_of_others_is_left_alone(made, tmp_path, name):
    """Guards an ordinary model, which has no card, and the directory that one happens to be in."""
    destination = tmp_path / "base"
    destination.mkdir()
    (destination / name).write_text("mine")
    for place in (str(destination), str(destination / name)):
        with pytest.raises(ModelError, match="a place of its own"):
            export_model(Place(str(made)), place, cache="")
    assert (destination / name).read_text() == "mine"
    assert len(list(destination.iterdir())) == 1


def test_a_revision_of_a_directory_is_refused(made, tmp_path):
    """Guards a revision that has no effect."""
    with pytest.raises(ModelError, match="only names of the hub"):
        export_model(Place(str(made), "v2"), str(tmp_path / "mars"), cache="")


def test_secrets_of_a_uri_are_not_repeated(made):
    """Guards passwords in logs of jobs."""
    uri = "s3://user:secret@bucket/mars?endpoint_override=127.0.0.1:9&scheme=http&hidden=1"
    with pytest.raises(ModelError) as caught:
        export_model(Place(str(made)), uri, cache="")
    assert "secret" not in str(caught.value)
    assert "s3://bucket/mars" in str(caught.value)


def test_an_incomplete_checkpoint_is_refused(made, tmp_path):
    """Guards half a model in the store that all services load from."""
    broken = tmp_path / "broken"
    shutil.copytree(made, broken)
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ModelError, match="cut short"):
        export_model(Place(str(broken)), str(tmp_path / "mars"), cache="")
    assert not (tmp_path / "mars").exists()


def test_a_home_directory_is_one(made, tmp_path, monkeypatch):
    """Guards a model in a directory that is named `~`, where no service looks."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    export_model(Place(str(made)), "~/mars", cache="")
    assert read_card(tmp_path / "home" / "mars") == read_card(made)
    assert not (tmp_path / "~").exists()
