"""A checkpoint directory, complete if and only if its manifest is there.

    model/              a Hugging Face model directory, ready to load anywhere; or a draft adapter
    adapters.safetensors   with LoRA: what was trained; in model/ it is merged. Of a draft adapter
                        the float32 weights; in model/ they are bfloat16
    trainer/rank_N.pt   what rank N needs to resume: optimizer, random state, running means
    state.json          step, loader position, job identity, last metrics
    manifest.json       every other file with its size; written last

`trainer/` files are read with `weights_only=True`: nothing in a checkpoint can run code.
"""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mars_ray.data.loader import LoaderState
from mars_ray.errors import CheckpointError
from mars_ray.files import remedy, write_whole
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
    data: str = ""  # StagePlan.data; empty in checkpoints of earlier versions
    mask_tokens: int = 0  # mask rows with a target that were trained on so far


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


def clear_unfinished(run_dir: Path) -> None:
    """Remove incomplete checkpoints of killed attempts, while no other process writes there."""
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
                _write_manifest(directory)
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


def assign(directory: Path, identity: str) -> None:
    """Give a copied checkpoint another job's identity. All identities have the same length, so the
    manifest stays valid."""
    path = directory / STATE
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"identity": identity}, indent=1))
    verify(directory)


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
    """The inverse of `random_state`."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _write_manifest(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
    write_whole(directory / MANIFEST, json.dumps({"files": sizes}, indent=1))
