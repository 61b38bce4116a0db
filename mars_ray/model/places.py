"""Inspects, fetches and exports models and draft adapters at their places (`storage.place`).

Only the files that a model needs are fetched: weights in safetensors, and its JSON and text files.
Torch is imported where weights are read, and transformers for a whole configuration: both take
seconds, and a driver that deploys a service seldom needs them.
"""

import hashlib
from pathlib import Path
from typing import Any

from mars_ray.errors import ModelError
from mars_ray.model.directory import (
    CARD_FILE,
    CONFIG_FILE,
    DRAFT_CARD_FILE,
    DraftCard,
    ModelCard,
    check_complete,
    check_supported,
    read_card,
    read_draft_card,
    stored_config,
)
from mars_ray.storage import copies
from mars_ray.storage.copies import Directory
from mars_ray.storage.place import Place, shown


def pinned(place: Place) -> tuple[Place, ModelCard]:
    """A model's place under a name that means the same on every node and later on, and its card.

    Raises ModelError.
    """
    with copies.pinned(place, CARD_FILE, CONFIG_FILE) as (known, directory):
        return known, read_card(directory, called=shown(place.name))


def check_architecture(place: Place) -> None:
    """Raises ModelError for a model that the decoding engine does not support; only its
    configuration is fetched."""
    with copies.pinned(place, CONFIG_FILE) as (_, directory):
        called = shown(place.name)
        check_supported(stored_config(directory, called), called)


def config_of(place: Place) -> Any:
    """The model's configuration; nothing else is fetched. Raises ModelError."""
    from mars_ray.model.load import read_config

    with copies.pinned(place, CONFIG_FILE) as (_, directory):
        return read_config(directory, called=shown(place.name))


def local_copy(place: Place, cache: str) -> Path:
    """The model's directory on this node, fetched if it is not here yet.

    Several processes of a node fetch it once. Raises ModelError if it cannot be fetched whole.
    """
    directory = copies.fetched(place, cache, _check_model, "checkpoint")
    check_complete(directory)
    return directory


def export_model(place: Place, destination: str, cache: str) -> dict[str, int]:
    """Copies the files that loading needs, and `frontier.json` if there is one. Returns the numbers
    of `files` and `bytes`.

    The configuration is copied last, after the card. A directory without a configuration is not
    accepted as a model, so a truncated copy cannot be served. Nor can a trained model be served as
    a plain one because its card is missing. Raises ModelError if the checkpoint is not whole, or
    the destination cannot be used.
    """
    directory = local_copy(pinned(place)[0], cache)
    files = copies.wanted(Directory.at(str(directory)))
    names = [file.name for file in files]
    last = [name for name in (CARD_FILE, CONFIG_FILE) if name in names]
    copies.publish(directory, [name for name in names if name not in last], last, destination)
    return {"files": len(files), "bytes": sum(file.size for file in files)}


def pinned_adapter(name: str) -> tuple[str, DraftCard]:
    """A name that means the same on every node and later on, and the adapter's card.

    A directory is named by its absolute path, a hub repository with its commit. Raises ModelError.
    """
    place = Place.parse(name)
    with copies.pinned(place, DRAFT_CARD_FILE) as (known, directory):
        card = read_draft_card(directory, called=shown(name))
    return f"{known.name}@{known.revision}" if known.revision else known.name, card


def local_adapter(name: str, cache: str) -> Path:
    """The adapter's directory on this node, fetched if it is not here yet. Raises ModelError."""
    return copies.fetched(Place.parse(name), cache, _check_adapter, "draft adapter")


def adapter_name(name: str, directory: Path) -> str:
    """The adapter's name in replies and metrics: the end of its place, and a digest of its content,
    such as `adapt-smollm2/adapter@3f9a21c4`.

    Another adapter at the same place therefore has another name. Raises ModelError.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(directory.iterdir()):
            if path.suffix == ".safetensors" or path.name == DRAFT_CARD_FILE:
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    except OSError as error:
        raise ModelError(f"the draft adapter {directory} cannot be read: {error}") from error
    # The last part alone does not distinguish adapters: `mars-ray adapt` uses the same for all.
    parts = [part for part in shown(Place.parse(name).name).split("/") if part][-2:]
    return f"{'/'.join(parts)}@{digest.hexdigest()[:8]}"


def _check_model(directory: Path, called: str) -> None:
    check_complete(directory)
    read_card(directory, called)


def check_adapter(name: str, cache: str, base: str | None) -> None:
    """Reads a draft adapter in full. Raises ModelError, also if it is not for the model in the
    directory `base`."""
    from mars_ray.model.draft_adapter import read_draft_adapter

    read_draft_adapter(local_adapter(name, cache), base)


def _check_adapter(directory: Path, _called: str) -> None:
    from mars_ray.model.draft_adapter import read_draft_adapter

    read_draft_adapter(directory, base=None)
