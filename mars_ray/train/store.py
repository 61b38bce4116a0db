"""Copies of a run's checkpoints in an object store, or whatever else pyarrow opens by URI.

    <storage_path>/<stage>/step_N/...            as in the run directory
    <storage_path>/<stage>/step_N/manifest.json  written last, deleted first

Credentials and regions come from where the store's clients look for them.
"""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem

from mars_ray.errors import CheckpointError
from mars_ray.model.object_store import shown
from mars_ray.train import checkpoint

_PARALLEL_FILES = 4
_CHUNK_BYTES = 16 * 1024 * 1024


def below(uri: str, *names: str) -> str:
    """The URI of a directory further down."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(path="/".join((parts.path.rstrip("/"), *names))))


class CheckpointStore:
    """The copies of one stage."""

    def __init__(self, uri: str, stage: str) -> None:
        """Raises CheckpointError if the URI means nothing to pyarrow."""
        self.name = shown(below(uri, stage))
        with self._explained("open", uri):
            self._files, root = FileSystem.from_uri(uri)
        self._root = f"{root.rstrip('/')}/{stage}"

    def steps(self) -> set[int]:
        """Steps with a complete copy. Raises CheckpointError if the store does not answer."""
        selector = FileSelector(self._root, allow_not_found=True, recursive=True)
        with self._explained("list"):
            infos = self._files.get_file_info(selector)
        manifests = [Path(i.path) for i in infos if i.base_name == checkpoint.MANIFEST]
        found = (path.parent for path in manifests)
        return {checkpoint.step_of(path) for path in found if checkpoint.is_ours(path)}

    def upload(self, directory: Path) -> None:
        """Copy a complete checkpoint. Raises CheckpointError."""
        manifest = directory / checkpoint.MANIFEST
        with self._explained(f"copy {directory.name} to"):
            others = [path for path in directory.rglob("*") if path.is_file() and path != manifest]
            with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
                list(pool.map(lambda path: self._send(directory, path), others))
            self._send(directory, manifest)

    def download(self, step: int, run_dir: Path) -> Path:
        """Put a copy into a run directory, whole or not at all. Raises CheckpointError."""
        final = checkpoint.directory_of(run_dir, step)
        draft = final.with_name(f".{final.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        source = f"{self._root}/{final.name}"
        with self._explained(f"fetch {final.name} from"):
            infos = self._files.get_file_info(FileSelector(source, recursive=True))
            paths = [info.path for info in infos if info.type == FileType.File]
            with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
                list(pool.map(lambda p: self._receive(p, draft / p[len(source) + 1 :]), paths))
        checkpoint.verify(draft)
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        return final

    def metric(self, step: int, name: str) -> float | None:
        """A metric that was saved with a checkpoint. Raises CheckpointError."""
        path = f"{self._root}/{checkpoint.directory_of(Path(), step)}/{checkpoint.STATE}"
        with self._explained("read"), self._files.open_input_stream(path) as stream:
            metrics = json.loads(stream.read())["metrics"]
        return metrics.get(name)

    def delete(self, step: int) -> None:
        """Remove a copy. Raises CheckpointError."""
        directory = f"{self._root}/{checkpoint.directory_of(Path(), step)}"
        with self._explained("delete from"):
            self._files.delete_file(f"{directory}/{checkpoint.MANIFEST}")
            infos = self._files.get_file_info(FileSelector(directory, recursive=True))
            for info in infos:
                if info.type == FileType.File:
                    self._files.delete_file(info.path)
            if isinstance(self._files, LocalFileSystem):
                self._files.delete_dir(directory)

    def _send(self, directory: Path, path: Path) -> None:
        target = f"{self._root}/{directory.name}/{path.relative_to(directory).as_posix()}"
        if isinstance(self._files, LocalFileSystem):
            self._files.create_dir(target.rpartition("/")[0])
        with path.open("rb") as local, self._files.open_output_stream(target) as stored:
            shutil.copyfileobj(local, stored, _CHUNK_BYTES)

    def _receive(self, path: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._files.open_input_stream(path) as stored, target.open("wb") as local:
            shutil.copyfileobj(stored, local, _CHUNK_BYTES)

    @contextmanager
    def _explained(self, action: str, uri: str = "") -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, NotImplementedError) as error:
            # Its text may have the URI with all its secrets, and so has the chain of exceptions.
            said = str(error).replace(uri, shown(uri)) if uri else str(error)
            raise CheckpointError(
                f"cannot {action} {self.name}: {said}. Mend checkpoint.storage_path or its "
                "access and run again; checkpoints in the run directory are untouched"
            ) from None
