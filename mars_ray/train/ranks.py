"""The ranks of a training run: their collective operations, and the watchdog of each.

When a step takes too long, every rank writes its stacks and ends. The stacks are written by
faulthandler's own thread, which needs no interpreter lock, so it works while a collective hangs.
The process ends a little later, so that all ranks can write. Ray then starts the group again from
the last checkpoint.
"""

import faulthandler
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from mars_ray.errors import CheckpointError, MarsError


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others; every method is a collective, and free with a single rank."""

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def current(cls, device: torch.device) -> "Ranks":
        """This process in the default process group, or a single rank if there is none."""
        if not dist.is_initialized():
            return cls(0, 1, device)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files that are written only once."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, on the CPU; `values` is a small tensor on any device."""
        if self.world_size == 1:
            return values.cpu()
        total = values.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total.cpu()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks; only for rare use."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def alike(self) -> Iterator[None]:
        """A context for what every rank does by itself: an error of ours that one meets is raised
        on every rank, with the host's name if others did not meet it. It is a barrier, too."""
        problem = None
        try:
            yield
        except MarsError as error:
            problem = f"rank {self.rank} on {socket.gethostname()}", error
        met = [found for found in self.gather(problem) if found is not None]
        if met:
            where, error = met[0]
            raise error if len(met) == self.world_size else CheckpointError(f"{where}: {error}")

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """A context for collective work on storage: if it fails on one rank, it fails on all.

        Raises CheckpointError on every rank, with each rank's error. It is a barrier, too.
        """
        problem = None
        try:
            yield
        # torch and safetensors raise their own errors for a full disk.
        except (OSError, RuntimeError, SafetensorError, MarsError) as error:
            problem = f"rank {self.rank} on {socket.gethostname()}: {error}"
        met = [found for found in self.gather(problem) if found is not None]
        if met:
            raise CheckpointError("; ".join(met))


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Shape of a parameter, even if ZeRO stage 3 has split it and its tensor is empty."""
    return getattr(parameter, "ds_shape", parameter.shape)


_DUMP_S = 0.5  # time to write the stacks
_GRACE_S = 5.0  # time for the other ranks


class Watchdog:
    """Ends the process unless `feed` is called every `timeout_s` seconds; a context manager."""

    def __init__(self, directory: Path, rank: int, timeout_s: float) -> None:
        self._path = directory / f"rank_{rank}.txt"
        self._timeout_s = timeout_s
        self._fed = time.monotonic()
        self._doing = "starting"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a")
        self.feed("starting")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join()
        self._file.close()
        if self._path.stat().st_size == 0:
            self._path.unlink()

    def feed(self, doing: str) -> None:
        """Note what begins now; it may take `timeout_s` seconds."""
        self._fed, self._doing = time.monotonic(), doing
        faulthandler.dump_traceback_later(self._timeout_s, file=self._file)

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._timeout_s)):
            if time.monotonic() < self._fed + self._timeout_s + _DUMP_S:
                continue
            print(
                f"{socket.gethostname()}, process {os.getpid()}: {self._doing} took more than "
                f"{self._timeout_s:g} s",
                file=self._file,
                flush=True,
            )
            if not self._ended.wait(_GRACE_S):
                os._exit(1)


def stacks(directory: Path) -> str:
    """A sentence about the stacks in a directory; empty if there are none."""
    files = [path for path in sorted(directory.glob("rank_*.txt")) if path.stat().st_size]
    if not files:
        return ""
    lines = [line for path in files for line in path.read_text(errors="replace").splitlines()]
    said = next((line for line in lines if "took more than" in line), "a step took too long")
    return (
        f"{said}; where each rank stood is in {', '.join(str(path) for path in files)}. If it "
        "was slow rather than stuck, raise cluster.step_timeout_s"
    )
