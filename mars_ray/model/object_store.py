"""Checkpoints in object stores: on a node there is a whole copy of one, or none.

pyarrow opens the stores, as in Ray Train's `storage_path`: credentials and regions come from where
its clients look for them (environment, instance roles).

    <cache>/<name>-<digest>            a whole copy; the digest is that of the URI and its files
    <cache>/<name>-<digest>.partial    being fetched, or what a process that died left
    <cache>/<name>-<digest>.lock       held by the process that fetches
"""

import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from filelock import FileLock
from pyarrow.fs import FileSelector, FileSystem, FileType

from mars_ray.errors import ModelError
from mars_ray.model.card import CARD_FILE, ModelCard, read_card
from mars_ray.model.complete import CONFIG_FILE, check_complete

logger = logging.getLogger(__name__)

# Not *.bin and *.pt, which are programs, nor code.
WANTED = (".safetensors", ".json", ".txt", ".model", ".jinja")

_USER = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*:/+)[^/?#]*@")
_DIGEST_CHARS = 12
_PARALLEL_FILES = 4
_CHUNK_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Stored:
    """A file of the store; a changed one has another size or time."""

    path: str
    name: str
    size: int
    changed_ns: int | None


def shown(uri: str) -> str:
    """A URI without what may be a secret: user, password and options. Others as they are."""
    # With one slash it is no URI, but a mistake that will be told with it.
    uri = _USER.sub(r"\1", uri)
    if "://" not in uri:
        return uri
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def stored_card(uri: str) -> ModelCard:
    """The card of the checkpoint at a URI. Raises ModelError."""
    with tempfile.TemporaryDirectory() as directory:
        for name in (CARD_FILE, CONFIG_FILE):
            copy_file(uri, name, Path(directory))
        return read_card(directory, called=shown(uri))


def copy_file(uri: str, name: str, directory: Path) -> None:
    """One file of the checkpoint at a URI, if it has it. Raises ModelError."""
    filesystem, files = _listing(uri)
    for file in files:
        if file.name == name:
            _fetch(filesystem, file, directory, uri)


def _check_model(directory: Path, called: str) -> None:
    check_complete(directory)
    read_card(directory, called)


def copy_from_store(
    uri: str, cache: Path, check: Callable[[Path, str], None] = _check_model
) -> Path:
    """A directory below `cache` with the checkpoint at a URI. Raises ModelError.

    Another process that wants it at the same time waits and uses the same copy. `check` is given
    the copy and its name in messages, and raises ModelError for one that is not whole.
    """
    filesystem, files = _listing(uri)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot keep models in {cache}: {error}; set model_cache=") from error
    directory = cache / f"{_name(uri)}-{_digest(uri, files)}"
    with FileLock(f"{directory}.lock", fallback_to_soft=False):
        if not directory.exists():
            _download(uri, filesystem, files, directory, check)
    return directory


def _listing(uri: str) -> tuple[FileSystem, list[_Stored]]:
    """The files of a checkpoint, by name."""
    try:
        filesystem, root = FileSystem.from_uri(uri)
        infos = filesystem.get_file_info(FileSelector(root))
    except (OSError, ValueError, NotImplementedError) as error:
        # Its text may have the URI with all its secrets, and so has the chain of exceptions.
        said = str(error).replace(uri, shown(uri))
        raise ModelError(f"cannot read {shown(uri)}: {said}") from None
    files = [
        _Stored(info.path, info.base_name, info.size, info.mtime_ns)
        for info in infos
        if info.type == FileType.File and info.base_name.endswith(WANTED)
    ]
    return filesystem, sorted(files, key=lambda file: file.name)


def _name(uri: str) -> str:
    return Path(urlsplit(uri).path).name or "model"


def _digest(uri: str, files: list[_Stored]) -> str:
    listed = repr((shown(uri), [(file.name, file.size, file.changed_ns) for file in files]))
    return hashlib.sha256(listed.encode()).hexdigest()[:_DIGEST_CHARS]


def _download(
    uri: str,
    filesystem: FileSystem,
    files: list[_Stored],
    directory: Path,
    check: Callable[[Path, str], None],
) -> None:
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    total = sum(file.size for file in files)
    logger.info("fetching %s: %d files, %d bytes", shown(uri), len(files), total)
    with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
        list(pool.map(lambda file: _fetch(filesystem, file, partial, uri), files))
    # An upload meanwhile would leave us with files of two versions.
    if _listing(uri)[1] != files:
        raise ModelError(f"{shown(uri)} was changed while it was fetched; start again")
    check(partial, shown(uri))
    os.replace(partial, directory)


def _fetch(filesystem: FileSystem, file: _Stored, directory: Path, uri: str) -> None:
    target = directory / file.name
    try:
        with filesystem.open_input_stream(file.path) as stored, target.open("wb") as local:
            shutil.copyfileobj(stored, local, _CHUNK_BYTES)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot fetch {file.name} of {shown(uri)}: {error}") from error
    size = target.stat().st_size
    if size != file.size:
        raise ModelError(
            f"{file.name} of {shown(uri)} came with {size} of {file.size} bytes; start again"
        )
