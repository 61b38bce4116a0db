"""Speed of training: model FLOPs as a share of the devices' peak, and which rank is slow.

FLOPs are counted as the model needs them, without padding and recomputation: 6 for each weight and
row that passes it, forward and backward (2 and 4), and 12 for each query-key pair and attention
width (arXiv 2204.02311, appendix B). A row at position p sees p + 1 keys, in both streams.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_ray.model.forward import output_head
from mars_ray.train.ranks import Ranks, whole_shape

_PROBE_ROWS = {"cpu": 768, "cuda": 8192}
_PROBE_REPEATS = 4


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The sizes of a model that decide the FLOPs of a step."""

    body_weights: int  # of matrices that every row passes
    head_weights: int  # of the output projection, which rows with a target pass
    attention_width: int  # heads times head size, summed over layers

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelFlops":
        """The sizes of a model, whole or split among ranks."""
        linear = [module for module in model.base_model.modules() if isinstance(module, nn.Linear)]
        config = model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            sum(module.in_features * module.out_features for module in linear),
            sum(math.prod(whole_shape(weight)) for weight in output_head(model).parameters()),
            config.num_hidden_layers * config.num_attention_heads * size,
        )

    def counted(self, counts: Mapping[Any, float]) -> float:
        """FLOPs of a step with these `step_counts`."""
        return self.step(counts["filled"], counts["targets"], counts["pairs"])

    def step(self, rows: float, target_rows: float, pairs: float) -> float:
        """FLOPs for these rows without padding, rows with a target, and query-key pairs."""
        per_weight = self.body_weights * rows + self.head_weights * target_rows
        return 6 * per_weight + 12 * self.attention_width * pairs


@dataclass(frozen=True, slots=True)
class DraftFlops:
    """The sizes that decide the FLOPs of a draft adapter's step, whose model is frozen.

    Clean rows pass it forward (2 for each weight), mask rows forward and backward (4); the
    adapter's weights are trained (6). Keys and values of clean rows get no gradient, so a mask
    row's pair costs 8, a clean row's 4. A clean row's distribution serves all overlapping grids.
    """

    model: ModelFlops
    adapter_weights: int  # those that every mask row passes
    grids: int

    def counted(self, counts: Mapping[Any, float]) -> float:
        """FLOPs of a step with these `step_counts`."""
        clean, masks = counts["tokens"], counts["masks"]
        mask_pairs = counts["pairs"] - counts["clean_pairs"]
        return (
            self.model.body_weights * (2 * clean + 4 * masks)
            + self.model.head_weights * (4 * masks + 2 * masks / self.grids)
            + 6 * self.adapter_weights * masks
            + self.model.attention_width * (4 * counts["clean_pairs"] + 8 * mask_pairs)
        )


Flops = ModelFlops | DraftFlops


def peak_flops(ranks: Ranks, stated_tflops: float | None, *, bfloat16: bool) -> float:
    """FLOP/s of all ranks' devices, either stated or measured by a matrix product; collective."""
    mine = stated_tflops * 1e12 if stated_tflops else _measured(ranks.device, bfloat16)
    return ranks.sum(torch.tensor([mine], dtype=torch.float64)).item()


class RankTimer:
    """Time that a rank spends on its own part of steps: loading data and forward passes.

    Under ZeRO-3, forward passes gather weights: ranks wait there, and a slow rank is less visible.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._on_cuda = ranks.device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time of this context."""
        if self._on_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started

    def slowest(self) -> dict[str, float]:
        """The slowest rank since the last call, and its time over the median; collective."""
        if self._events:
            self._events[-1][1].synchronize()
        seconds = self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1e3
        self._seconds, self._events = 0.0, []
        if self._ranks.world_size == 1:
            return {}
        by_rank = torch.zeros(self._ranks.world_size, dtype=torch.float64)
        by_rank[self._ranks.rank] = seconds
        by_rank = self._ranks.sum(by_rank)
        rank = int(by_rank.argmax())
        median = max(by_rank.quantile(0.5).item(), 1e-9)
        return {"slowest_rank": rank, "slowest_over_median": by_rank[rank].item() / median}


def _measured(device: torch.device, bfloat16: bool) -> float:
    rows = _PROBE_ROWS[device.type]
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    left: Tensor = torch.randn(rows, rows, device=device).to(dtype)
    seconds = []
    for _ in range(_PROBE_REPEATS):
        started = time.perf_counter()
        (left @ left)[0, 0].item()
        seconds.append(time.perf_counter() - started)
    return 2 * rows**3 / min(seconds)
