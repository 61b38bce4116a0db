"""The ranks of a training run, and their collective operations."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

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
    def together(self) -> Iterator[None]:
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
