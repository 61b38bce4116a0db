"""A directory on a disk or in an object store, opened and copied by pyarrow.

Credentials and regions come from the sources that the stores' clients use: environment, instance
roles. Failures raise OSError, ValueError or NotImplementedError (`place.explained`).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem, copy_files

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
        return cls(_LOCAL, str(Path(name).expanduser().resolve()))

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
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            list(pool.map(lambda file: self._get(file, local), files))

    def put(self, local: Path, names: Sequence[str], last: Sequence[str] = ()) -> None:
        """Copies files of a local directory: `names` in any order, then `last` in order.

        A file that arrives incomplete is deleted again, and raises OSError.
        """
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            list(pool.map(lambda name: self._put(local, name), names))
        for name in last:
            self._put(local, name)

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

    def _get(self, file: StoredFile, local: Path) -> None:
        target = local / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        source = f"{self.root}/{file.name}"
        copy_files(source, str(target), self.filesystem, _LOCAL, chunk_size=_CHUNK_BYTES)
        if (size := target.stat().st_size) != file.size:
            raise OSError(f"{file.name} came with {size} of {file.size} bytes; start again")

    def _put(self, local: Path, name: str) -> None:
        target = f"{self.root}/{name}"
        self._make(name.rpartition("/")[0])
        copy_files(str(local / name), target, _LOCAL, self.filesystem, chunk_size=_CHUNK_BYTES)
        written = self.filesystem.get_file_info(target).size
        if written != (local / name).stat().st_size:
            # A last file that stays would mark the others as complete.
            with suppress(OSError):
                self.filesystem.delete_file(target)
            raise OSError(f"{name} arrived with {written} bytes")
