"""Which checkpoints stay: the last ones, the best ones, and copies of them in an object store.

Copies are made by a thread, while training goes on. A checkpoint is deleted here only once it has
been copied; at most one waits to be.
"""

import queue
import threading
from collections.abc import Mapping
from pathlib import Path

from mars_ray.config.train import CheckpointConfig
from mars_ray.errors import CheckpointError
from mars_ray.train import checkpoint
from mars_ray.train.store import CheckpointStore


def kept(scores: Mapping[int, float | None], config: CheckpointConfig) -> set[int]:
    """The steps whose checkpoints stay; `scores` has the best-metric of each, if it is known."""
    last = set(sorted(scores)[-config.keep :])
    return last | set(_best(scores, config)[: config.best.keep] if config.best else ())


def best_checkpoint(run_dir: Path, config: CheckpointConfig) -> Path:
    """The best of the checkpoints that a run has kept. Raises CheckpointError if none is scored."""
    steps = _best(_local_scores(run_dir, config), config)
    if not steps:
        raise CheckpointError(f"no checkpoint in {run_dir} has the metric of checkpoint.best")
    return checkpoint.directory_of(run_dir, steps[0])


def fetch_copies(run_dir: Path, config: CheckpointConfig, stage: str) -> None:
    """Bring the store's best checkpoints here, and its newest if it is newer than all here.

    Raises CheckpointError if there is a store and it does not answer, or what it has is damaged.
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


class Keeper:
    """Deletes and copies checkpoints of one run; used by rank 0 alone."""

    def __init__(self, run_dir: Path, config: CheckpointConfig, stage: str) -> None:
        """Raises CheckpointError if the store cannot be reached."""
        self._run_dir = run_dir
        self._config = config
        self._uploader: _Uploader | None = None
        if config.storage_path is not None:
            store = CheckpointStore(config.storage_path, stage)
            self._uploader = _Uploader(store, config)
            self._copy_what_was_missed(store)

    def saved(self, directory: Path) -> None:
        """A checkpoint is complete. Waits if another one still waits to be copied."""
        if self._uploader is not None:
            self._uploader.put(directory)
        scores = _local_scores(self._run_dir, self._config)
        busy = self._uploader.busy() if self._uploader else set()
        for step in scores.keys() - kept(scores, self._config):
            path = checkpoint.directory_of(self._run_dir, step)
            if path not in busy:
                checkpoint.delete(path)

    def close(self) -> None:
        """Wait for copies. Raises CheckpointError if the last one failed."""
        if self._uploader is not None:
            self._uploader.close()

    def _copy_what_was_missed(self, store: CheckpointStore) -> None:
        newest = checkpoint.newest(self._run_dir)
        if newest is not None and checkpoint.step_of(newest) not in store.steps():
            assert self._uploader is not None
            self._uploader.put(newest)


class _Uploader:
    def __init__(self, store: CheckpointStore, config: CheckpointConfig) -> None:
        self._store = store
        self._config = config
        self._queue: queue.Queue[Path | None] = queue.Queue(maxsize=1)
        self._busy: set[Path] = set()
        self._failure: CheckpointError | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-upload", daemon=True)
        self._thread.start()

    def put(self, directory: Path) -> None:
        self._busy.add(directory)
        self._queue.put(directory)

    def busy(self) -> set[Path]:
        return set(self._busy)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (directory := self._queue.get()) is not None:
            try:
                self._store.upload(directory)
                self._prune()
                self._failure = None
            except CheckpointError as error:
                # The next one may succeed; training does not wait for the store to come back.
                self._failure = error
                print(f"checkpoint.storage_path: {error}", flush=True)
            finally:
                self._busy.discard(directory)

    def _prune(self) -> None:
        scores = _stored_scores(self._store, self._config)
        for step in scores.keys() - kept(scores, self._config):
            self._store.delete(step)


def _best(scores: Mapping[int, float | None], config: CheckpointConfig) -> list[int]:
    """Scored steps, best first; of equals the later first."""
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
