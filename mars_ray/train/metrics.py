"""Metrics of training: running means, `metrics.jsonl`, TensorBoard, progress on the terminal, and
speed.

Scalars for TensorBoard are written by the thread that logs them. tensorboardX's own writer has a
thread and a queue of ten places; a full disk ends the thread, and the training loop would then wait
for a place for ever.

The driver shows what it reads in the file that rank 0 writes: on a terminal as a bar, otherwise as
a plain line per logged step, with a line of progress in between if steps take long.

Speed is model FLOPs as a share of the devices' peak, and which rank is slow. FLOPs are counted as
the model needs them, without padding and recomputation: 6 for each weight and row that passes it,
forward and backward (2 and 4), and 12 for each query-key pair and attention width (arXiv
2204.02311, appendix B). A row at position p sees p + 1 keys, in both streams.
"""

import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import RecordWriter
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_ray.files import write_whole
from mars_ray.model.forward import output_head
from mars_ray.model.shape import shape_of_config
from mars_ray.progress import Bars
from mars_ray.train.model_step import COUNTS, Stream
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
        shape = shape_of_config(model.config)
        return cls(
            sum(module.in_features * module.out_features for module in linear),
            sum(math.prod(whole_shape(weight)) for weight in output_head(model).parameters()),
            shape.layers * shape.query_size,
        )

    def counted(self, counts: Mapping[Any, float]) -> float:
        """FLOPs of a step with these `step_counts`."""
        per_weight = self.body_weights * counts["filled"] + self.head_weights * counts["targets"]
        return 6 * per_weight + 12 * self.attention_width * counts["pairs"]


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
    if stated_tflops:
        mine = stated_tflops * 1e12
    else:
        rows = _PROBE_ROWS[ranks.device.type]
        left: Tensor = torch.randn(rows, rows, device=ranks.device)
        left = left.to(torch.bfloat16 if bfloat16 else torch.float32)
        seconds = []
        for _ in range(_PROBE_REPEATS):
            started = time.perf_counter()
            (left @ left)[0, 0].item()
            seconds.append(time.perf_counter() - started)
        mine = 2 * rows**3 / min(seconds)
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


class Meter:
    """Means over the steps since the last `flush`, kept on the device and reduced only there."""

    def __init__(
        self,
        device: torch.device,
        flops: Flops,
        peak_flops: float,
        streams: tuple[Stream, ...],
    ) -> None:
        """`peak_flops` is in FLOP/s, for all ranks together."""
        self._flops, self._peak_flops = flops, peak_flops
        self._streams = streams
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._counts = torch.zeros(len(COUNTS), dtype=torch.float64)
        self._steps = torch.zeros(3, dtype=torch.float64)  # all, and those with rows of each sum
        self._started = time.monotonic()

    def add(self, local: Tensor, counts: Tensor) -> None:
        """Add a step: this rank's (loss, its two sums) and the global `step_counts`."""
        divisor, steps = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        for stream in self._streams:
            divisor[1 + stream.sum] = counts[stream.count].clamp_min(1e-9)
            steps[1 + stream.sum] = float(counts[stream.count] > 0)
        self._sums += local / divisor.to(local.device)
        self._counts += counts
        self._steps += steps

    def flush(self, ranks: Ranks) -> dict[str, float]:
        """Global means since the last flush, the same on every rank; collective."""
        loss, *sums = (ranks.sum(self._sums) / self._steps.clamp_min(1)).tolist()
        elapsed = time.monotonic() - self._started
        metrics = {"loss": loss} | {stream.name: sums[stream.sum] for stream in self._streams}
        done = dict(zip(COUNTS, self._counts.tolist(), strict=True))
        flops = self._flops.counted(done)
        metrics["tokens_per_s"] = done["tokens"] / elapsed
        if done["masks"]:
            metrics["mask_tokens_per_s"] = done["masks"] / elapsed
        metrics["flops_utilisation"] = flops / elapsed / self._peak_flops
        metrics["padding_share"] = 1 - done["filled"] / max(1.0, done["rows"])
        self._sums.zero_()
        self._counts.zero_()
        self._steps.zero_()
        self._started = time.monotonic()
        return metrics

    def state(self) -> dict[str, Any]:
        """This rank's part, for a checkpoint that falls between two flushes."""
        return {
            "sums": self._sums.cpu().clone(),
            "counts": self._counts.clone(),
            "steps": self._steps.clone(),
            "elapsed_s": time.monotonic() - self._started,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._sums.copy_(state["sums"])
        self._counts.copy_(state["counts"])
        self._steps.copy_(state["steps"])
        self._started = time.monotonic() - state["elapsed_s"]


class MetricsWriter:
    """Appends to a run's `metrics.jsonl` and TensorBoard files; used by rank 0 alone.

    An attempt begins with a line of kind "start". Later steps' lines, left by an attempt that died,
    are dropped, so that each step occurs once.
    """

    def __init__(self, path: Path, step: int, total_steps: int, workers: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            # A line without its end was being written when the process died.
            whole = (line for line in lines if line.endswith("\n"))
            write_whole(path, "".join(line for line in whole if json.loads(line)["step"] <= step))
        self._file = path.open("a", encoding="utf-8")
        start = {"step": step, "total_steps": total_steps, "workers": workers}
        self._append({"kind": "start", **start})
        board = path.parent / "tensorboard"
        board.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._board = RecordWriter(str(board / name))
        self._append_event(Event(file_version="brain.Event:2"))
        # Has TensorBoard drop later steps that are in earlier event files.
        log = SessionLog(status=SessionLog.START)
        self._append_event(Event(session_log=log, step=step + 1))

    def write(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """Write one line; `kind` is "train" or "eval". Raises OSError if the storage does."""
        self._append({"kind": kind, "step": step, **metrics})
        values = [
            Summary.Value(tag=f"{kind}/{name}", simple_value=value)
            for name, value in metrics.items()
        ]
        self._append_event(Event(summary=Summary(value=values), step=step))

    def set_length(self, step: int, total_steps: int) -> None:
        """Write a line of kind "length": the stage will have `total_steps` steps."""
        self._append({"kind": "length", "step": step, "total_steps": total_steps})

    def close(self) -> None:
        for file in (self._file, self._board):
            # Each write was flushed. Anything left could not be written, which was reported then; a
            # second report would hide the error that ends the run.
            with suppress(OSError):
                file.close()

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _append_event(self, event: Event) -> None:
        event.wall_time = time.time()
        self._board.write(event.SerializeToString())
        self._board.flush()


@dataclass(slots=True)
class MetricsReader:
    """Follows a `metrics.jsonl` that another process writes, and may shorten on a restart."""

    path: Path
    offset: int = 0
    inode: int = 0  # a shortened file is a new file with another inode

    def new(self) -> list[dict[str, Any]]:
        """The complete lines that were added since the last call.

        In a shortened file they begin at its last start: earlier lines were returned before.
        """
        if not self.path.exists():
            return []
        known = 0
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self.inode or status.st_size < self.offset:
                known, self.offset, self.inode = self.inode, 0, status.st_ino
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self.offset += len(whole) + len(newline)
        records = [json.loads(line) for line in whole.splitlines()]
        starts = [i for i, record in enumerate(records) if record.get("kind") == "start"]
        return records[starts[-1] :] if known and starts else records


class StageProgress:
    """Shows a stage; use as a context manager and call `update` now and then."""

    def __init__(self, stage: str, reader: MetricsReader) -> None:
        self._stage = stage
        self._reader = reader
        self._total_steps = 0
        self._console = Console(stderr=True)
        self._bars = Bars(
            self._console,
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._task = self._bars.add_task(f"{stage}: starting workers", total=None, text="")

    def __enter__(self) -> "StageProgress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        self._bars.stop()

    def say(self, message: str) -> None:
        """Print a separate line, above the bar."""
        self._bars.say(f"{self._stage}: {message}")

    def update(self) -> None:
        for record in self._reader.new():
            step, kind = record["step"], record["kind"]
            total = self._total_steps = record.get("total_steps", self._total_steps)
            if kind == "start":
                self._bars.update(self._task, description=self._stage)
                if step:
                    self.say(f"resumed at step {step} of {total}, {record['workers']} workers")
            text = "  ".join(f.format(record[name]) for name, f in _SHOWN.items() if name in record)
            self._bars.update(self._task, completed=step, total=total)
            if kind == "eval":
                self.say(f"step {step}, held out: {text}")
            elif self._console.is_terminal:
                self._bars.update(self._task, text=text)
            elif kind == "train":
                self.say(f"step {step}/{total}: {text}")


_SHOWN = {
    "loss": "loss {:.4f}",
    "clean_ce": "clean {:.4f}",
    "noisy_ce": "noisy {:.4f}",
    "head_loss": "head {:.4f}",
    "row_loss": "rows {:.4f}",
    "tokens_per_forward": "expected T/F {:.2f}",
    "lr": "lr {:.2e}",
    "tokens_per_s": "{:.0f} tok/s",
    "mask_tokens_per_s": "{:.0f} masks/s",
    "flops_utilisation": "MFU {:.1%}",
    "padding_share": "padding {:.1%}",
    "slowest_over_median": "slowest rank {:.2f}x",
}
