"""Copies of a stage's checkpoints in an object store, or in anything that pyarrow opens by URI.

<storage_path>/<stage>/step_N/...            as in the run directory
<storage_path>/<stage>/step_N/manifest.json  written last, deleted first
"""

import json
import shutil
from contextlib import AbstractContextManager
from pathlib import Path, PurePath

from mars_ray.errors import CheckpointError
from mars_ray.storage.directory import Directory
from mars_ray.storage.place import below, explained
from mars_ray.train import checkpoint

_ADVICE = (
    ". Mend checkpoint.storage_path or its access and run again; checkpoints in the run directory "
    "are untouched"
)


class CheckpointStore:
    """The copies of one stage."""

    def __init__(self, uri: str, stage: str) -> None:
        """Raises CheckpointError if pyarrow does not understand the URI."""
        self._uri = below(uri, stage)
        with self._explained("open"):
            self._directory = Directory.at(self._uri)

    def steps(self) -> set[int]:
        """Steps with a complete copy. Raises CheckpointError if the store does not answer."""
        with self._explained("list"):
            files = self._directory.files(recursive=True, must_exist=False)
        paths = [PurePath(file.name) for file in files]
        found = [Path(path.parent) for path in paths if path.name == checkpoint.MANIFEST]
        return {checkpoint.step_of(path) for path in found if checkpoint.is_ours(path)}

    def upload(self, directory: Path) -> None:
        """Copy a complete checkpoint. Raises CheckpointError."""
        paths = [path.relative_to(directory) for path in directory.rglob("*") if path.is_file()]
        names = {path.as_posix() for path in paths} - {checkpoint.MANIFEST}
        with self._explained(f"copy {directory.name} to"):
            copy = self._directory.below(directory.name)
            copy.put(directory, sorted(names), [checkpoint.MANIFEST])

    def download(self, step: int, run_dir: Path) -> Path:
        """Put a copy into a run directory, whole or not at all. Raises CheckpointError."""
        final = checkpoint.directory_of(run_dir, step)
        draft = final.with_name(f".{final.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        with self._explained(f"fetch {final.name} from"):
            copy = self._directory.below(final.name)
            copy.get(copy.files(recursive=True), draft)
        checkpoint.verify(draft)
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        return final

    def metric(self, step: int, name: str) -> float | None:
        """A metric that was saved with a checkpoint. Raises CheckpointError."""
        with self._explained("read"):
            state = json.loads(self._copy(step).read(checkpoint.STATE))
        return state["metrics"].get(name)

    def delete(self, step: int) -> None:
        """Remove a copy. Raises CheckpointError."""
        with self._explained("delete from"):
            self._copy(step).delete(checkpoint.MANIFEST)

    def _copy(self, step: int) -> Directory:
        return self._directory.below(checkpoint.directory_of(Path(), step).name)

    def _explained(self, action: str) -> AbstractContextManager[None]:
        return explained(CheckpointError, action, self._uri, _ADVICE)
