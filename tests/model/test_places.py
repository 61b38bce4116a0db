"""Checkpoints from directories, stores and the hub: whole, once, and with clear errors."""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub.constants
import pytest
from model.small_hub import COMMIT, NAME, hub
from model.small_s3 import bucket

from mars_ray.config.decode import EngineConfig
from mars_ray.config.inputs import PresetModel
from mars_ray.decode.loading import load_engine
from mars_ray.errors import ModelError
from mars_ray.model.create import create_model
from mars_ray.model.directory import PLAIN, read_card
from mars_ray.model.load import load_model
from mars_ray.model.places import config_of, local_copy, pinned
from mars_ray.storage.copies import Directory
from mars_ray.storage.place import Place

WORDS = ["one two three four five six seven eight nine ten"] * 50


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A model directory with a file beside it that nobody should fetch."""
    directory = tmp_path_factory.mktemp("made") / "mars"
    create_model(PresetModel(preset="tiny", vocab_size=300), lambda: WORDS, directory, seed=0)
    (directory / "pytorch_model.bin").write_bytes(b"a program")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    return directory


@pytest.fixture
def stored(made, tmp_path) -> Path:
    """A copy to break, below a folder that is the store."""
    return Path(shutil.copytree(made, tmp_path / "store" / "models" / "mars"))


@pytest.fixture
def s3(stored, monkeypatch) -> Iterator[tuple[str, list[str]]]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "password")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with bucket(stored.parents[1]) as (options, reads):
        yield f"s3://bucket/models/mars{options}", reads


def test_a_store_gives_a_model_that_decodes(s3, tmp_path, made):
    """Over S3's own protocol, from the listing to an engine; and without what is not wanted."""
    uri, reads = s3
    source, card = pinned(Place(uri))
    assert card == read_card(made)
    assert reads == ["mars.json", "config.json"]
    directory = local_copy(source, str(tmp_path / "cache"))
    wanted, arrived = (
        {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
        for root in (made, directory)
    )
    assert arrived == wanted - {Path("pytorch_model.bin")}
    for name in arrived:
        assert (directory / name).read_bytes() == (made / name).read_bytes()
    config = EngineConfig(max_batch=1, max_context=32, device="cpu", window_control=False)
    load_engine(directory, config)


def test_a_copy_is_made_once_however_many_ask(s3, tmp_path):
    """Replicas of a node start at the same time; the listing is all that each of them reads."""
    uri, reads = s3
    with ThreadPoolExecutor(4) as pool:
        copies = set(pool.map(lambda _: local_copy(Place(uri), str(tmp_path)), range(4)))
    assert len(copies) == 1
    assert len(reads) == len(set(reads))


def test_a_changed_checkpoint_is_another_copy(stored, tmp_path):
    """Guards a rolling update that serves the old weights again."""
    uri = f"file://{stored}"
    first = local_copy(Place(uri), str(tmp_path / "cache"))
    assert local_copy(Place(uri), str(tmp_path / "cache")) == first
    os.utime(stored / "model.safetensors", (1, 1))
    assert local_copy(Place(uri), str(tmp_path / "cache")) != first


def test_a_fetch_that_fails_leaves_no_copy(stored, tmp_path):
    """A file cut short is named; once the store is mended, the next try succeeds."""
    weights, cache = stored / "model.safetensors", tmp_path / "cache"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or was cut short"):
        local_copy(Place(f"file://{stored}"), str(cache))
    assert not [path for path in cache.iterdir() if path.is_dir() and path.suffix != ".partial"]
    weights.write_bytes(whole)
    assert (local_copy(Place(f"file://{stored}"), str(cache)) / "config.json").exists()


def test_an_upload_in_the_middle_is_noticed(stored, tmp_path, monkeypatch):
    """Guards a copy with files of two versions."""
    get = Directory.get

    def get_and_change(store, files, local):
        get(store, files, local)
        os.utime(stored / "config.json", (2, 2))

    monkeypatch.setattr(Directory, "get", get_and_change)
    with pytest.raises(ModelError, match="was changed while it was fetched"):
        local_copy(Place(f"file://{stored}"), str(tmp_path / "cache"))


def test_shards_must_all_be_there(stored):
    """By the index, without loading anything."""
    os.rename(stored / "model.safetensors", stored / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (stored / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"has no model-2\.safetensors"):
        local_copy(Place(str(stored)), "unused")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{empty}", r"neither mars\.json nor config\.json"),
        ("file://{empty}", r"neither mars\.json nor config\.json"),
        ("file://{empty}/none", "cannot read file://.*none"),
        ("nonsense://user:secret@host/x?token=secret", "cannot read nonsense://host/x:"),
        ("s3://bucket/none{options}", "cannot read s3://bucket/none:"),
    ],
)
def test_what_is_no_checkpoint_is_told(name, message, tmp_path, s3):
    """On the driver, before any replica starts."""
    options = s3[0].partition("?")[2]
    named = name.format(empty=tmp_path, options=f"?{options}")
    with pytest.raises(ModelError, match=message) as caught:
        pinned(Place(named))
    assert "secret" not in str(caught.value)


def test_a_directory_that_another_node_lacks_is_told(tmp_path):
    """The driver saw it, the replica does not."""
    with pytest.raises(ModelError, match="storage that all nodes share"):
        local_copy(Place(str(tmp_path / "none")), "unused")


def test_a_revision_without_a_hub_is_refused(made):
    """Guards a revision that has no effect."""
    with pytest.raises(ModelError, match="only names of the hub"):
        pinned(Place(str(made), "v2"))


@pytest.mark.parametrize("place", ["directory", "store", "hub"])
def test_a_model_without_a_card_is_a_plain_one_wherever_it_is(
    made, stored, tmp_path, monkeypatch, place
):
    """Guards a card that is looked for alone, and a model that is none for want of it."""
    (stored / "mars.json").unlink()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub(stored) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        names = {"directory": str(stored), "store": f"file://{stored}", "hub": NAME}
        source, card = pinned(Place(names[place]))
        assert card == PLAIN
        assert config_of(source).model_type == "qwen2"
        directory = local_copy(source, str(tmp_path / "cache"))
    assert (directory / "model.safetensors").read_bytes() == (
        made / "model.safetensors"
    ).read_bytes()


def test_the_hub_gives_one_commit(made, tmp_path, monkeypatch):
    """Replicas that start later get what the first ones got; offline, what is there already."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with hub(made) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        source, card = pinned(Place(NAME))
        assert (source.revision, card) == (COMMIT, read_card(made))
        directory = local_copy(source, "unused")
        with pytest.raises(ModelError, match=r"no directory org/other in .*, and the .* hub.*404"):
            pinned(Place("org/other"))
    assert (directory / "model.safetensors").exists()
    assert not (directory / "pytorch_model.bin").exists()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pinned(Place(NAME)) == (source, card)
    assert local_copy(source, "unused") == directory
    with pytest.raises(ModelError, match="give org/other: HF_HUB_OFFLINE is set"):
        pinned(Place("org/other"))


@pytest.mark.parametrize(
    ("load", "name", "asked"),
    [
        (lambda name: pinned(Place(name)), "wrong/path", True),
        (lambda name: load_model(name, dtype=None), "wrong/path", True),
        (lambda name: load_model(name, dtype=None), "runs/wrong/path", False),
        (lambda name: pinned(Place(name)), "runs/wrong/path", False),
        (lambda name: load_engine(name, EngineConfig()), "wrong/path", False),
    ],
)
def test_a_wrong_path_is_one_line_that_names_it(load, name, asked, tmp_path, monkeypatch):
    """Guards the hub's two lines about its own connection, which say nothing of a path."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=f"^there is no directory {name} in {tmp_path}") as caught:
        load(name)
    said = str(caught.value)
    assert "\n" not in said
    assert "correct the path" in said
    assert ("hub" in said) == asked


def test_a_hub_that_cannot_be_reached_is_named(tmp_path, monkeypatch):
    """With its address, for there are mirrors; nothing listens at this one."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"http://127\.0\.0\.1:9 cannot be reached from here"):
        pinned(Place("wrong/path"))
