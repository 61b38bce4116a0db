"""Retention of checkpoints: the last ones, the best ones, and their copies in an object store.

Copies are made by a thread, the newest first, and training never waits for it. A checkpoint that
is no longer kept when its turn comes is not copied. A copy that fails is told, ends nothing, and is
made again with the next checkpoint; at the end of the run it is tried some more times.

    <storage_path>/<stage>/step_N/...            as in the run directory
    <storage_path>/<stage>/step_N/manifest.json  written last, deleted first
"""

import json
import queue
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path, PurePath

from mars_ray.config.train import CheckpointConfig
from mars_ray.errors import CheckpointError
from mars_ray.storage.copies import Directory
from mars_ray.storage.place import below, explained
from mars_ray.train import checkpoint

# Pauses before further attempts once training is over, when no next checkpoint brings one: stores
# refuse for seconds what they accept later, and their clients have retried for moments before.
_LAST_PAUSES_S = (2.0, 8.0)

_ADVICE = (
    ". Mend checkpoint.storage_path or its access and run again; checkpoints in the run directory "
    "are untouched"
)


class CheckpointStore:
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


def kept(scores: Mapping[int, float | None], config: CheckpointConfig) -> set[int]:
    """The steps whose checkpoints are kept; `scores` has each one's best-metric, if known."""
    last = set(sorted(scores)[-config.keep :])
    return last | set(_best(scores, config)[: config.best.keep] if config.best else ())


def best_checkpoint(run_dir: Path, config: CheckpointConfig) -> Path:
    """The best checkpoint that a run has kept. Raises CheckpointError if none is scored."""
    steps = _best(_local_scores(run_dir, config), config)
    if not steps:
        raise CheckpointError(f"no checkpoint in {run_dir} has the metric of checkpoint.best")
    return checkpoint.directory_of(run_dir, steps[0])


def fetch_copies(run_dir: Path, config: CheckpointConfig, stage: str) -> None:
    """Fetch the store's best checkpoints, and its newest if it is newer than all local ones.

    Raises CheckpointError if there is a store that does not answer, or its copies are damaged.
    """
    if config.storage_path is None:
        return
    store = CheckpointStore(config.storage_path, stage)
    here = {checkpoint.step_of(path) for path in checkpoint.complete(run_dir)}
    scores = _stored_scores(store, config)
    wanted = set(_best(scores, config)[: config.best.keep] if config.best else ())
    if max(scores, default=-1) > max(here, default=-1):
        wanted.add(max(scores))
    for step in wanted - here:
        store.download(step, run_dir)


class CheckpointManager:
    """Deletes and copies checkpoints of one run; used by rank 0 alone."""

    def __init__(self, run_dir: Path, config: CheckpointConfig, stage: str) -> None:
        """Raises CheckpointError if the store cannot be reached, unless the run has begun."""
        self._run_dir = run_dir
        self._config = config
        self._uploader: _Uploader | None = None
        if config.storage_path is not None:
            store = CheckpointStore(config.storage_path, stage)
            if not checkpoint.complete(run_dir):
                store.steps()  # to see that the store answers
            self._uploader = _Uploader(run_dir, store, config)
            # Copy what an earlier attempt could not.
            self._uploader.want(self._kept())

    def saved(self) -> None:
        """Copy and delete checkpoints after a new one is complete."""
        if self._uploader is not None:
            self._uploader.want(self._kept())
        self._delete_the_rest()

    def close(self) -> None:
        """Wait for the copies. Raises CheckpointError if the last one failed."""
        if self._uploader is None:
            return
        self._uploader.close()
        with suppress(OSError):  # a failure here is no reason to train again
            self._delete_the_rest()
        if self._uploader.failure is not None:
            raise self._uploader.failure

    def _kept(self) -> set[int]:
        return kept(_local_scores(self._run_dir, self._config), self._config)

    def _delete_the_rest(self) -> None:
        # No copy is begun of a checkpoint that is not kept, but one may still be running.
        spared = self._kept() | ({self._uploader.step} if self._uploader else set())
        for path in checkpoint.complete(self._run_dir):
            if checkpoint.step_of(path) not in spared:
                checkpoint.delete(path)


class _Uploader:
    """A thread that copies the kept checkpoints to the store."""

    def __init__(self, run_dir: Path, store: CheckpointStore, config: CheckpointConfig) -> None:
        self.step: int | None = None  # the one being copied
        self.failure: CheckpointError | None = None  # of the last attempt
        self._run_dir = run_dir
        self._store = store
        self._config = config
        self._wanted: set[int] = set()
        self._choosing = threading.Lock()
        self._changes: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: no more
        self._thread = threading.Thread(target=self._run, name="checkpoint-upload", daemon=True)
        self._thread.start()

    def want(self, steps: set[int]) -> None:
        """Copy these checkpoints; no other copy is begun from now on."""
        with self._choosing:
            self._wanted = steps
        self._changes.put(True)

    def close(self) -> None:
        """Wait until the store holds the wanted checkpoints, or the attempt has failed."""
        self._changes.put(False)
        self._thread.join()

    def _run(self) -> None:
        while self._changes.get():
            self._copy()
        for pause_s in _LAST_PAUSES_S:
            if self.failure is None:
                break
            time.sleep(pause_s)
            self._copy()

    def _copy(self) -> None:
        try:
            while (step := self._choose()) is not None:
                self._store.upload(checkpoint.directory_of(self._run_dir, step))
                self._prune()
            self.failure = None
        except Exception as error:  # noqa: BLE001 - without its thread nothing would be copied
            # The next attempt may succeed; training does not wait for the store to recover.
            known = isinstance(error, CheckpointError)
            self.failure = error if known else CheckpointError(f"a copy failed: {error!r}")
            print(f"checkpoint.storage_path: {self.failure}", flush=True)
        finally:
            self.step = None

    def _choose(self) -> int | None:
        stored = self._store.steps()
        with self._choosing:
            self.step = max(self._wanted - stored, default=None)
            return self.step

    def _prune(self) -> None:
        scores = _stored_scores(self._store, self._config)
        for step in scores.keys() - kept(scores, self._config) - self._wanted:
            self._store.delete(step)


def _best(scores: Mapping[int, float | None], config: CheckpointConfig) -> list[int]:
    """Scored steps, best first; among equals the later first."""
    if config.best is None:
        return []
    sign = -1 if config.best.wants_highest else 1
    scored = [(sign * score, -step) for step, score in scores.items() if score is not None]
    return [-step for _, step in sorted(scored)]


def _stored_scores(store: CheckpointStore, config: CheckpointConfig) -> dict[int, float | None]:
    best = config.best
    return {step: store.metric(step, best.metric) if best else None for step in store.steps()}


def _local_scores(run_dir: Path, config: CheckpointConfig) -> dict[int, float | None]:
    scores: dict[int, float | None] = {}
    for path in checkpoint.complete(run_dir):
        step = checkpoint.step_of(path)
        best = config.best
        scores[step] = checkpoint.read_state(path).metrics.get(best.metric) if best else None
    return scores
