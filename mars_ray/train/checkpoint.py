"""A checkpoint directory, complete if and only if its manifest is there.

    model/              a Hugging Face model directory, ready to load anywhere
    trainer/rank_N.pt   what rank N needs to go on: optimizer, random state, running means
    state.json          step, loader position, job identity, last metrics
    manifest.json       every other file with its size; written last

`trainer/` files are read with `weights_only=True`: nothing in a checkpoint can run code.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mars_ray.data.loader import LoaderState
from mars_ray.errors import CheckpointError
from mars_ray.train.ranks import Ranks

_MANIFEST = "manifest.json"
_STATE = "state.json"
MODEL = "model"


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where training stands, the same on every rank."""

    step: int  # optimizer steps done
    total_steps: int
    seconds: float  # of training so far, over all attempts
    world_size: int
    identity: str  # of the job, see plan.identity_hash
    loader: LoaderState
    metrics: dict[str, float]  # the last known


def directory_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / f"step_{step:08d}"


def newest(run_dir: Path) -> Path | None:
    """The last complete checkpoint of a run, if there is one.

    What lies there counts, not what Ray has heard of: a run that was ended right after writing a
    checkpoint has not told it.
    """
    return max((path.parent for path in run_dir.glob(f"step_*/{_MANIFEST}")), default=None)


def write(
    directory: Path,
    ranks: Ranks,
    state: TrainState,
    rank_state: dict[str, Any],
    write_model: Callable[[Path], None],
) -> None:
    """Write a checkpoint; collective. `write_model` is, too: it writes on rank 0.

    All ranks write into the same directory, which is on storage that all nodes share.
    """
    trainer = directory / "trainer"
    if ranks.is_main:
        # Left by an attempt that died: its manifest must not vouch for the new files.
        shutil.rmtree(directory, ignore_errors=True)
        trainer.mkdir(parents=True)
        (directory / _STATE).write_text(json.dumps(asdict(state), indent=1))
    write_model(directory / MODEL)
    ranks.barrier()
    torch.save(rank_state, trainer / f"rank_{ranks.rank}.pt")
    ranks.barrier()
    if ranks.is_main:
        _write_manifest(directory)
    ranks.barrier()


def verify(directory: Path) -> None:
    """Raises CheckpointError, saying what is missing, unless the checkpoint is complete."""
    manifest = directory / _MANIFEST
    if not manifest.exists():
        raise CheckpointError(
            f"{directory} is no complete checkpoint: it has no {_MANIFEST}, which is written last. "
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
    content = json.loads((directory / _STATE).read_text())
    return TrainState(**content | {"loader": LoaderState(**content["loader"])})


def assign(directory: Path, identity: str) -> None:
    """Make a copied checkpoint another job's. All identities have one length: the manifest stays
    true."""
    path = directory / _STATE
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"identity": identity}, indent=1))
    verify(directory)


def read_rank_state(directory: Path, rank: int) -> dict[str, Any]:
    """A rank's own part. Raises CheckpointError if there is none for it."""
    path = directory / "trainer" / f"rank_{rank}.pt"
    if not path.exists():
        raise CheckpointError(
            f"{directory} holds no state of rank {rank}: it was written by fewer workers. "
            "Resume with as many workers as before"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _write_manifest(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
    # Beside its final place, so that it appears whole or not at all.
    draft = directory / f".{_MANIFEST}"
    draft.write_text(json.dumps({"files": sizes}, indent=1))
    os.replace(draft, directory / _MANIFEST)
