"""A checkpoint directory, complete if and only if its manifest is there; and which checkpoints are
kept: the last ones, the best ones, and their copies in an object store.

    model/              a Hugging Face model directory, ready to load anywhere; or a draft adapter
    adapters.safetensors   with LoRA: what was trained; in model/ it is merged. Of a draft adapter
                        the float32 weights; in model/ they are bfloat16
    trainer/rank_N.pt   what rank N needs to resume: optimizer, random state, running means
    state.json          step, loader position, job identity, last metrics
    manifest.json       every other file with its size; written last

`trainer/` files are read with `weights_only=True`: nothing in a checkpoint can run code.

Copies are made by a thread, the newest first, and training never waits for it. A checkpoint that
is no longer kept when its turn comes is not copied. A copy that fails is told, ends nothing, and is
made again with the next checkpoint; at the end of the run it is tried some more times.

    <storage_path>/<stage>/step_N/...            as in the run directory
    <storage_path>/<stage>/step_N/manifest.json  written last, deleted first
"""

import json
import pickle
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from mars_ray.config.train import CheckpointConfig
from mars_ray.data.loader import LoaderState
from mars_ray.errors import CheckpointError
from mars_ray.files import remedy, write_whole
from mars_ray.storage.copies import Directory
from mars_ray.storage.place import below, explained
from mars_ray.train.ranks import Ranks

MANIFEST = "manifest.json"
STATE = "state.json"
MODEL = "model"
ADAPTERS = "adapters.safetensors"
_NAME = re.compile(r"step_\d{8,}")


@dataclass(frozen=True, slots=True)
class TrainState:
    """The state of training that is the same on every rank."""

    step: int  # optimizer steps done
    total_steps: int
    seconds: float  # of training so far, over all attempts
    world_size: int
    identity: str  # of the job, see plan.identity_hash
    loader: LoaderState
    metrics: dict[str, float]  # the latest
    data: str  # StagePlan.data
    mask_tokens: int  # mask rows with a target that were trained on so far


def directory_of(run_dir: Path, step: int) -> Path:
    return run_dir / f"step_{step:08d}"


def step_of(directory: Path) -> int:
    """The inverse of `directory_of`."""
    return int(directory.name.removeprefix("step_"))


def is_ours(directory: Path) -> bool:
    """Whether the name is a checkpoint's; users put copies beside them, like step_00000010.bak."""
    return _NAME.fullmatch(directory.name) is not None


def complete(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = (path.parent for path in run_dir.glob(f"step_*/{MANIFEST}"))
    return sorted(filter(is_ours, found))


def newest(run_dir: Path) -> Path | None:
    """The last complete checkpoint of a run, if there is one."""
    return max(complete(run_dir), default=None)


def _draft_of(directory: Path) -> Path:
    """The place of a copy that is being fetched."""
    return directory.with_name(f".{directory.name}.draft")


def clear_unfinished(run_dir: Path) -> None:
    """Remove incomplete checkpoints and copies of killed attempts, while no other process writes
    there."""
    for path in run_dir.glob(_draft_of(Path("step_*")).name):
        shutil.rmtree(path, ignore_errors=True)
    for path in run_dir.glob("step_*"):
        if is_ours(path) and not (path / MANIFEST).exists():
            shutil.rmtree(path, ignore_errors=True)


def delete(directory: Path) -> None:
    """Remove a checkpoint, its manifest first, so that a partly removed one counts as none."""
    (directory / MANIFEST).unlink()
    shutil.rmtree(directory, ignore_errors=True)


def write(
    directory: Path,
    ranks: Ranks,
    state: TrainState,
    rank_state: dict[str, Any],
    write_model: Callable[[Path], None],
) -> None:
    """Write a checkpoint; collective. `write_model` is collective too, and writes on rank 0.

    All ranks write into the same directory, on storage that all nodes share. Raises CheckpointError
    on every rank if one of them cannot write; earlier checkpoints are untouched.
    """
    trainer = directory / "trainer"
    try:
        with ranks.barrier():
            if ranks.is_main:
                # Left by an attempt that died: its manifest must not vouch for the new files.
                shutil.rmtree(directory, ignore_errors=True)
                trainer.mkdir(parents=True)
                (directory / STATE).write_text(json.dumps(asdict(state), indent=1))
        # This is collective: it runs on all ranks or on none.
        with ranks.barrier():
            write_model(directory / MODEL)
        with ranks.barrier():
            torch.save(rank_state, trainer / f"rank_{ranks.rank}.pt")
        with ranks.barrier():
            if ranks.is_main:
                files = sorted(path for path in directory.rglob("*") if path.is_file())
                sizes = {f.relative_to(directory).as_posix(): f.stat().st_size for f in files}
                write_whole(directory / MANIFEST, json.dumps({"files": sizes}, indent=1))
    except CheckpointError as error:
        if ranks.is_main:
            shutil.rmtree(directory, ignore_errors=True)
        last = newest(directory.parent)
        raise CheckpointError(
            f"the checkpoint {directory} could not be written: {error}. "
            + (f"The last one, {last.name}, is untouched. " if last else "There is none before. ")
            + f"{remedy(error)}, then run the same command again to resume"
        ) from error


def verify(directory: Path) -> None:
    """Raises CheckpointError, saying what is missing, unless the checkpoint is complete."""
    manifest = directory / MANIFEST
    if not manifest.exists():
        raise CheckpointError(
            f"{directory} is no complete checkpoint: it has no {MANIFEST}, which is written last. "
            "Writing it was interrupted; use an earlier one, or delete it"
        )
    wrong = []
    for name, size in json.loads(manifest.read_text())["files"].items():
        path = directory / name
        if not path.exists():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != size:
            wrong.append(f"{name} has {path.stat().st_size} bytes, not {size}")
    if wrong:
        raise CheckpointError(f"{directory} is damaged: {'; '.join(wrong)}")


def read_state(directory: Path) -> TrainState:
    """The common part of a checkpoint that has been verified."""
    content = json.loads((directory / STATE).read_text())
    return TrainState(**content | {"loader": LoaderState(**content["loader"])})


def read_rank_state(directory: Path, rank: int) -> dict[str, Any]:
    """A rank's own part, memory-mapped, not read. Raises CheckpointError if there is none."""
    path = directory / "trainer" / f"rank_{rank}.pt"
    if not path.exists():
        raise CheckpointError(f"{directory} holds no state of rank {rank}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The generators' states, for a checkpoint."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


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
        found = [Path(path.parent) for path in paths if path.name == MANIFEST]
        return {step_of(path) for path in found if is_ours(path)}

    def upload(self, directory: Path) -> None:
        """Copy a complete checkpoint. Raises CheckpointError."""
        paths = [path.relative_to(directory) for path in directory.rglob("*") if path.is_file()]
        names = {path.as_posix() for path in paths} - {MANIFEST}
        with self._explained(f"copy {directory.name} to"):
            copy = self._directory.below(directory.name)
            copy.put(directory, sorted(names), [MANIFEST])

    def download(self, step: int, run_dir: Path) -> None:
        """Put a copy into a run directory, whole or not at all. Raises CheckpointError."""
        final = directory_of(run_dir, step)
        draft = _draft_of(final)
        shutil.rmtree(draft, ignore_errors=True)
        with self._explained(f"fetch {final.name} from"):
            copy = self._directory.below(final.name)
            copy.get(copy.files(recursive=True), draft)
        verify(draft)
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)

    def metric(self, step: int, name: str) -> float | None:
        """A metric that was saved with a checkpoint. Raises CheckpointError."""
        return self._state(step)["metrics"].get(name)

    def identity(self, step: int) -> str:
        """The identity of the job that saved a checkpoint. Raises CheckpointError."""
        return self._state(step)["identity"]

    def delete(self, step: int) -> None:
        """Remove a copy. Raises CheckpointError."""
        with self._explained("delete from"):
            self._copy(step).delete(MANIFEST)

    def _state(self, step: int) -> dict[str, Any]:
        with self._explained("read"):
            return json.loads(self._copy(step).read(STATE))

    def _copy(self, step: int) -> Directory:
        return self._directory.below(directory_of(Path(), step).name)

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
    return directory_of(run_dir, steps[0])


def fetch_copies(
    run_dir: Path, config: CheckpointConfig, stage: str, ours: Collection[str]
) -> None:
    """Fetch the store's best checkpoints, and its newest if it is newer than all local ones.

    `ours` are the identities of this job. Raises CheckpointError if there is a store that does not
    answer, or its copies are damaged or another job's.
    """
    if config.storage_path is None:
        return
    store = CheckpointStore(config.storage_path, stage)
    here = {step_of(path) for path in complete(run_dir)}
    scores = _stored_scores(store, config)
    wanted = set(_best(scores, config)[: config.best.keep] if config.best else ())
    if max(scores, default=-1) > max(here, default=-1):
        wanted.add(max(scores))
    for step in wanted - here:
        if store.identity(step) not in ours:
            raise CheckpointError(
                f"checkpoint.storage_path {config.storage_path} holds another job's copies: name "
                "another"
            )
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
            if not complete(run_dir):
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
        for path in complete(self._run_dir):
            if step_of(path) not in spared:
                delete(path)


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
            while True:
                stored = self._store.steps()
                with self._choosing:
                    self.step = max(self._wanted - stored, default=None)
                if self.step is None:
                    break
                self._store.upload(directory_of(self._run_dir, self.step))
                scores = _stored_scores(self._store, self._config)
                for step in scores.keys() - kept(scores, self._config) - self._wanted:
                    self._store.delete(step)
            self.failure = None
        except Exception as error:  # noqa: BLE001 - without its thread nothing would be copied
            # The next attempt may succeed; training does not wait for the store to recover.
            known = isinstance(error, CheckpointError)
            self.failure = error if known else CheckpointError(f"a copy failed: {error!r}")
            print(f"checkpoint.storage_path: {self.failure}", flush=True)
        finally:
            self.step = None


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
    best = config.best
    return {
        step_of(path): read_state(path).metrics.get(best.metric) if best else None
        for path in complete(run_dir)
    }
