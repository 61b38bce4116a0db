"""Directories on disks and in object stores, opened by pyarrow; and copies of places: fetched to
this machine, or published where services load them.

A machine has a whole copy of a place in an object store, or none:

    <cache>/<name>-<digest>            a whole copy; the digest covers the URI and its files
    <cache>/<name>-<digest>.partial    a fetch in progress, or the remains of one that died
    <cache>/<name>-<digest>.lock       held by the process that fetches

The hub's files are in its own cache, and a directory is used in place.

Credentials and regions come from the sources that the stores' clients use: environment, instance
roles. Failures of a directory's own methods raise OSError, ValueError or NotImplementedError
(`place.explained`).
"""

import hashlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path
from urllib.parse import urlsplit

from filelock import FileLock
from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem, copy_files

from mars_ray.errors import ModelError
from mars_ray.storage.hub import snapshot
from mars_ray.storage.place import Place, explained, shown

logger = logging.getLogger(__name__)

_PARALLEL_FILES = 4
_CHUNK_BYTES = 16 * 1024 * 1024
# Object stores have no directories, and would store an empty object instead.
_WITHOUT_DIRECTORIES = ("s3", "gcs", "abfs")
_LOCAL = LocalFileSystem()


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file by its name below the directory; a change shows in its size or time."""

    name: str
    size: int
    changed_ns: int | None


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory of a file system, which need not exist yet."""

    filesystem: FileSystem
    root: str

    @classmethod
    def at(cls, name: str) -> "Directory":
        if "://" in name:
            filesystem, root = FileSystem.from_uri(name)
            return cls(filesystem, root.rstrip("/"))
        return cls(_LOCAL, str(Path(expanduser(name)).resolve()))

    def below(self, name: str) -> "Directory":
        return Directory(self.filesystem, f"{self.root}/{name}")

    @property
    def is_file(self) -> bool:
        """Whether there is a file instead of the directory."""
        return self.filesystem.get_file_info(self.root).type == FileType.File

    def names(self) -> set[str]:
        """Names of all its entries; empty if there is no such directory."""
        infos = self.filesystem.get_file_info(FileSelector(self.root, allow_not_found=True))
        return {info.base_name for info in infos}

    def files(self, *, recursive: bool = False, must_exist: bool = True) -> list[StoredFile]:
        """The files in it, by name."""
        selector = FileSelector(self.root, recursive=recursive, allow_not_found=not must_exist)
        found = [
            StoredFile(info.path[len(self.root) + 1 :], info.size, info.mtime_ns)
            for info in self.filesystem.get_file_info(selector)
            if info.type == FileType.File
        ]
        return sorted(found, key=lambda file: file.name)

    def read(self, name: str) -> bytes:
        with self.filesystem.open_input_stream(f"{self.root}/{name}") as stream:
            return stream.read()

    def write_empty(self, name: str) -> None:
        """Creates an empty file, and the directory if there is none."""
        self._make("")
        self.filesystem.open_output_stream(f"{self.root}/{name}").close()

    def get(self, files: Sequence[StoredFile], local: Path) -> None:
        """Copies files into a local directory. Raises OSError if one arrives incomplete."""

        def copy(file: StoredFile) -> None:
            target = local / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            source = f"{self.root}/{file.name}"
            copy_files(source, str(target), self.filesystem, _LOCAL, chunk_size=_CHUNK_BYTES)
            if (size := target.stat().st_size) != file.size:
                raise OSError(f"{file.name} came with {size} of {file.size} bytes; start again")

        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            list(pool.map(copy, files))

    def put(self, local: Path, names: Sequence[str], last: Sequence[str] = ()) -> None:
        """Copies files of a local directory: `names` in any order, then `last` in order.

        A file that arrives incomplete is deleted again, and raises OSError.
        """

        def copy(name: str) -> None:
            target = f"{self.root}/{name}"
            self._make(name.rpartition("/")[0])
            copy_files(str(local / name), target, _LOCAL, self.filesystem, chunk_size=_CHUNK_BYTES)
            written = self.filesystem.get_file_info(target).size
            if written != (local / name).stat().st_size:
                # A last file that stays would mark the others as complete.
                with suppress(OSError):
                    self.filesystem.delete_file(target)
                raise OSError(f"{name} arrived with {written} bytes")

        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            list(pool.map(copy, names))
        for name in last:
            copy(name)

    def delete(self, first: str) -> None:
        """Deletes the file `first`, then everything else."""
        self.delete_file(first)
        for file in self.files(recursive=True, must_exist=False):
            self.delete_file(file.name)
        if self._has_directories:
            self.filesystem.delete_dir(self.root)

    def delete_file(self, name: str) -> None:
        self.filesystem.delete_file(f"{self.root}/{name}")

    @property
    def _has_directories(self) -> bool:
        return self.filesystem.type_name not in _WITHOUT_DIRECTORIES

    def _make(self, name: str) -> None:
        if self._has_directories:
            self.filesystem.create_dir(f"{self.root}/{name}".rstrip("/"))


# Files that a model or adapter needs. Excludes *.bin and *.pt, which can run code, and source code.
WANTED = (".safetensors", ".json", ".txt", ".model", ".jinja")
# Where transformers keeps chat templates besides the default one.
_TEMPLATES = "additional_chat_templates"
_DIGEST_CHARS = 12
# An empty file that exists until the last one has arrived: the files beside it are unfinished.
_UNFINISHED = "export.unfinished"

# Takes a copy and its name in messages; raises ModelError if the copy is not whole.
Check = Callable[[Path, str], None]


@contextmanager
def pinned(place: Place, *names: str) -> Iterator[tuple[Place, Path]]:
    """The place under a name that means the same on every node and later on, and a directory with
    its files `names`.

    A directory is named by its absolute path, a hub repository by its commit. Raises ModelError.
    """
    if place.revision and not place.is_on_hub:
        raise ModelError(f"{shown(place.name)}: only names of the hub have a revision")
    if place.is_on_hub:
        directory = snapshot(place, names)
        yield replace(place, revision=directory.name), directory
    elif place.is_uri:
        with tempfile.TemporaryDirectory() as scratch:
            store, files = _listing(place.name)
            known = {file.name: file for file in files}
            for name in names:
                if name in known:
                    _fetch(store, [known[name]], Path(scratch), place.name)
            yield place, Path(scratch)
    else:
        yield replace(place, name=str(Path(place.name).resolve())), Path(place.name)


def fetched(place: Place, cache: str, check: Check, what: str) -> Path:
    """The place's directory on this machine, fetched if needed; `what` names its kind in messages.

    Several processes of a machine fetch it once. Raises ModelError if it cannot be fetched, and
    what `check` raises on a new copy from an object store.
    """
    if place.is_on_hub:
        return snapshot(place, [f"*{suffix}" for suffix in WANTED])
    if place.is_uri:
        return _cached(place.name, Path(expanduser(cache)), check)
    if not Path(place.name).is_dir():
        raise ModelError(
            f"there is no directory {place.name} on {socket.gethostname()}: put the {what} on "
            "storage that all nodes share, or name an object store or the hub"
        )
    return Path(place.name)


def wanted(directory: Directory) -> list[StoredFile]:
    """The files of a directory that a model or adapter needs."""
    named = directory.below(_TEMPLATES).files(must_exist=False)
    templates = [replace(file, name=f"{_TEMPLATES}/{file.name}") for file in named]
    return [file for file in (*directory.files(), *templates) if file.name.endswith(WANTED)]


def publish(directory: Path, names: Sequence[str], last: Sequence[str], destination: str) -> None:
    """Copies files of a directory to a new place, those of `last` at the end, in order.

    The very last file marks the copy as complete. An interrupted copy can be repeated. Raises
    ModelError if the destination holds anything else or is not writable.
    """
    with explained(ModelError, "write to", destination, "; export again"):
        target = Directory.at(destination)
        held = set() if target.is_file else target.names()
        written = {name.partition("/")[0] for name in (*names, *last[:-1])}
        was_cut_short = _UNFINISHED in held and held <= {*written, _UNFINISHED}
        if target.is_file or (held and not was_cut_short):
            raise ModelError(
                f"{shown(destination)} is there already: give every version of a model a place of "
                "its own, because services may be loading from this one"
            )
        target.write_empty(_UNFINISHED)
        target.put(directory, names, last)
        # Without the right to delete it stays, but means nothing once the last file exists.
        with suppress(OSError):
            target.delete_file(_UNFINISHED)


def _cached(uri: str, cache: Path, check: Check) -> Path:
    store, files = _listing(uri)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot keep models in {cache}: {error}; set model_cache=") from error
    name = Path(urlsplit(uri).path).name or "model"
    listed = repr((shown(uri), [(file.name, file.size, file.changed_ns) for file in files]))
    digest = hashlib.sha256(listed.encode()).hexdigest()[:_DIGEST_CHARS]
    directory = cache / f"{name}-{digest}"
    with FileLock(f"{directory}.lock", fallback_to_soft=False):
        if directory.exists():
            return directory
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        total = sum(file.size for file in files)
        logger.info("fetching %s: %d files, %d bytes", shown(uri), len(files), total)
        _fetch(store, files, partial, uri)
        # An upload during the fetch could have mixed files of two versions.
        if _listing(uri)[1] != files:
            raise ModelError(f"{shown(uri)} was changed while it was fetched; start again")
        check(partial, shown(uri))
        os.replace(partial, directory)
    return directory


def _listing(uri: str) -> tuple[Directory, list[StoredFile]]:
    """The place, and its wanted files."""
    with explained(ModelError, "read", uri):
        store = Directory.at(uri)
        return store, wanted(store)


def _fetch(store: Directory, files: list[StoredFile], local: Path, uri: str) -> None:
    with explained(ModelError, "fetch", uri):
        store.get(files, local)
