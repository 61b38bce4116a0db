"""Where a checkpoint comes from: a directory, the Hugging Face hub, or an object store.

    runs/demo/models/mars      a directory, which every node that loads it must see
    org/name                   the hub; kept in its own cache, offline if HF_HUB_OFFLINE says so
    s3://bucket/models/mars    an object store, or whatever else pyarrow opens; kept in our cache

Only what a model needs is fetched: weights in safetensors, and its JSON and text files.
"""

import re
import socket
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.utils import disable_progress_bars

from mars_ray.errors import ModelError
from mars_ray.model.card import CARD_FILE, ModelCard, read_card
from mars_ray.model.complete import CONFIG_FILE, check_complete
from mars_ray.model.load import read_config
from mars_ray.model.missing import missing
from mars_ray.model.object_store import WANTED, copy_file, copy_from_store, shown, stored_card

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint as a user names it."""

    name: str
    revision: str | None = None  # of the hub

    @property
    def is_uri(self) -> bool:
        """Whether it lies in an object store."""
        return "://" in self.name

    @property
    def is_on_hub(self) -> bool:
        """A name that is also a directory's is the directory."""
        fits = _HUB_NAME.fullmatch(self.name) is not None
        return fits and not self.is_uri and not Path(self.name).is_dir()


def pinned(source: Source) -> tuple[Source, ModelCard]:
    """The source by names that mean the same on every node and later on, and its card.

    A directory by its absolute path, a hub name by its commit. Raises ModelError.
    """
    if source.revision and not source.is_on_hub:
        raise ModelError(f"{shown(source.name)}: only names of the hub have a revision")
    if source.is_uri:
        return source, stored_card(source.name)
    if not source.is_on_hub:
        return replace(source, name=str(Path(source.name).resolve())), read_card(source.name)
    snapshot = hub_snapshot(source, CARD_FILE, CONFIG_FILE)
    return replace(source, revision=snapshot.name), read_card(snapshot, called=source.name)


def config_of(source: Source) -> Any:
    """The model's configuration; nothing else is fetched. Raises ModelError."""
    if not source.is_uri:
        directory = hub_snapshot(source, CONFIG_FILE) if source.is_on_hub else Path(source.name)
        return read_config(directory, called=source.name)
    with tempfile.TemporaryDirectory() as directory:
        copy_file(source.name, CONFIG_FILE, Path(directory))
        return read_config(directory, called=shown(source.name))


def local_copy(source: Source, cache: str) -> Path:
    """The model's directory on this node, fetched if it is not here yet.

    Several processes of a node fetch it once. Raises ModelError if it cannot be had whole.
    """
    if source.is_uri:
        return copy_from_store(source.name, Path(cache).expanduser())
    if source.is_on_hub:
        directory = hub_snapshot(source)
    else:
        directory = Path(source.name)
        if not directory.is_dir():
            raise ModelError(
                f"there is no directory {source.name} on {socket.gethostname()}: put the "
                "checkpoint on storage that all nodes share, or name an object store or the hub"
            )
    check_complete(directory)
    return directory


def hub_snapshot(source: Source, *only: str) -> Path:
    """The snapshot's directory in the hub's cache, which bears the commit's name; a file that the
    model does not have is not there. Raises ModelError."""
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        snapshot = huggingface_hub.snapshot_download(
            source.name,
            revision=source.revision,
            allow_patterns=list(only) or [f"*{suffix}" for suffix in WANTED],
        )
    except (OSError, ValueError) as error:
        raise missing(source.name, source.revision, error) from error
    return Path(snapshot)
