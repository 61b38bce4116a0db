"""Where a draft adapter comes from: the same places as a checkpoint (`source.py`).

runs/adapt-NAME/adapter    a directory, which every node that loads it must see
org/name, org/name@v2      the hub, its newest or a revision of it
s3://bucket/adapters/one   an object store
"""

import hashlib
import socket
import tempfile
from pathlib import Path

from mars_ray.errors import ModelError
from mars_ray.model.draft_adapter import (
    DRAFT_CARD_FILE,
    DraftCard,
    read_draft_adapter,
    read_draft_card,
)
from mars_ray.model.object_store import copy_file, copy_from_store, shown
from mars_ray.model.source import Source, hub_snapshot

_DIGEST_CHARS = 8
# `mars-ray adapt` has the same last part for all.
_NAME_PARTS = 2


def pinned_adapter(name: str) -> tuple[str, DraftCard]:
    """A name that means the same on every node and later on, and the adapter's card.

    A directory by its absolute path, a hub name with its commit. Raises ModelError.
    """
    source = _source(name)
    if source.is_uri:
        with tempfile.TemporaryDirectory() as directory:
            copy_file(name, DRAFT_CARD_FILE, Path(directory))
            return name, read_draft_card(directory, called=shown(name))
    if not source.is_on_hub:
        return str(Path(name).resolve()), read_draft_card(name)
    snapshot = hub_snapshot(source, DRAFT_CARD_FILE)
    return f"{source.name}@{snapshot.name}", read_draft_card(snapshot, called=name)


def local_adapter(name: str, cache: str) -> Path:
    """The adapter's directory on this node, fetched if it is not here yet. Raises ModelError."""
    source = _source(name)
    if source.is_uri:
        return copy_from_store(name, Path(cache).expanduser(), check=_check_copy)
    if source.is_on_hub:
        return hub_snapshot(source)
    if not Path(name).is_dir():
        raise ModelError(
            f"there is no directory {name} on {socket.gethostname()}: put the draft adapter on "
            "storage that all nodes share, or name an object store or the hub"
        )
    return Path(name)


def adapter_name(name: str, directory: Path) -> str:
    """As replies and metrics call it: the end of its place, and a digest of what is in it, such as
    `adapt-smollm2/adapter@3f9a21c4`.

    So another adapter at the same place has another name. Raises ModelError.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(directory.iterdir()):
            if path.suffix == ".safetensors" or path.name == DRAFT_CARD_FILE:
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    except OSError as error:
        raise ModelError(f"the draft adapter {directory} cannot be read: {error}") from error
    source = _source(name)
    parts = [part for part in shown(source.name).split("/") if part]
    return f"{'/'.join(parts[-_NAME_PARTS:])}@{digest.hexdigest()[:_DIGEST_CHARS]}"


def _source(name: str) -> Source:
    """A directory may have an @ in its name."""
    place, at, revision = name.partition("@")
    if at and not Path(name).is_dir() and (source := Source(place, revision)).is_on_hub:
        return source
    return Source(name)


def _check_copy(directory: Path, _called: str) -> None:
    read_draft_adapter(directory, base=None)
