"""The cost of a MARS step and of a draft adapter's step over an SFT step on the same tokens.

    python benchmarks/train_step.py --output RESULT.json [--case NAME ...]

Times: all objectives in one process, interleaved step by step on the same batches, medians. Memory:
each objective in a process of its own. On a CPU it is the peak resident size over what the process
held before the model; on a GPU it is the peak of torch's allocations. Every objective, SFT
included, sends only rows with a loss through the head.

For comparison, a plain `transformers.Trainer` does SFT on the same batches in a process of its own.
It is timed from the start to the end of its step, without loading data.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainerCallback, TrainingArguments

from mars_ray.config.inputs import CorpusSource, DataConfig, PresetModel, PresetName
from mars_ray.config.train import (
    ArObjective,
    ConstantBlockSize,
    DraftAdapterConfig,
    DraftObjective,
    MarsObjective,
    Objective,
    OptimizerConfig,
)
from mars_ray.core.layout import NO_TARGET, Layout, TokenBatch
from mars_ray.core.loss import loss_counts, row_coefficients
from mars_ray.data.corpus import problems
from mars_ray.data.loader import Loader
from mars_ray.data.rows import tokenize
from mars_ray.errors import MarsError
from mars_ray.files import check_writable
from mars_ray.model.create import create_model
from mars_ray.model.directory import read_card
from mars_ray.model.load import load_model, load_tokenizer, multiplies_bfloat16
from mars_ray.progress import Bars
from mars_ray.provenance import provenance
from mars_ray.train.draft_adapter import DraftStep, draft_card, fresh_weights
from mars_ray.train.engine import PlainEngine
from mars_ray.train.frozen import FrozenModel
from mars_ray.train.metrics import RankTimer
from mars_ray.train.model_step import StageObjective, TrainStep
from mars_ray.train.ranks import Ranks

_FOUR = ConstantBlockSize(size=4)
OBJECTIVES: dict[str, Objective] = {
    "sft": ArObjective(),
    "compact": MarsObjective(block_size=_FOUR),
    "compact, 3/4 noisy": MarsObjective(block_size=_FOUR, noisy_share=0.75),
    "compact, 1/2 noisy": MarsObjective(block_size=_FOUR, noisy_share=0.5),
    "paper": MarsObjective(block_size=_FOUR, layout="paper"),
    # As many mask rows as response tokens, and twice as many.
    "draft, 1 grid": DraftObjective(block_size=_FOUR, grids=1),
    "draft": DraftObjective(block_size=_FOUR),
}
_DRAFT_AND_SFT = ("sft", "draft, 1 grid", "draft")
_TRAINER = "transformers.Trainer, sft"
# The same as in training; otherwise the times would include glibc returning and requesting memory.
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TOP_PAD_": "268435456"}


@dataclass(frozen=True, slots=True)
class Case:
    """A shape and the batches it is measured on."""

    preset: PresetName
    bfloat16: bool
    rows: int
    max_length: int
    packing: bool
    warmup_steps: int
    repeats: int
    objectives: tuple[str, ...] = tuple(OBJECTIVES)


CASES = {
    # The demo's batch of one worker: conversations of similar length, padded.
    "tiny": Case("tiny", False, rows=16, max_length=256, packing=False, warmup_steps=5, repeats=15),
    # Not bfloat16: torch's attention backward is 5 times slower in it on a CPU (docs/log.md).
    "qwen2.5-0.5b": Case(
        "qwen2.5-0.5b", False, rows=2, max_length=256, packing=True, warmup_steps=1, repeats=3
    ),
    # The setting of adapter training: one conversation at a time, in bfloat16 where that is fast.
    "smollm2-135m": Case(
        "smollm2-135m",
        torch.cuda.is_available() or multiplies_bfloat16(),
        rows=1,
        max_length=256,
        packing=False,
        warmup_steps=3,
        repeats=9,
        objectives=_DRAFT_AND_SFT,
    ),
}


def main(words: Sequence[str] | None = None) -> None:
    """Measures the cases, prints the result as one JSON line and writes it to a file. Raises
    MarsError if the file cannot be written, before anything is measured."""
    parser = argparse.ArgumentParser(description="Time and peak memory of a training step.")
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all of them")
    arguments = parser.parse_args(words)
    check_writable(arguments.output, "--output")
    # Piped output has no width of its own, and 80 columns would cut the tables.
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    result = run_bench(arguments.case or list(CASES), console)
    # Printed before it is written, so that the result is not lost if the disk is full.
    print(json.dumps(result), flush=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def run_bench(cases: Sequence[str], console: Console) -> dict[str, Any]:
    """Measure the cases, print a table for each, and return all figures with ratios to SFT."""
    os.environ.update(_MALLOC)
    results = {}
    with Bars(console) as bars:
        total = sum(2 + len(CASES[name].objectives) for name in cases)
        task = bars.add_task("processes that measure", total=total)
        for name in cases:
            with tempfile.TemporaryDirectory() as scratch:
                results[name] = _measure_case(
                    CASES[name], Path(scratch), lambda: bars.advance(task)
                )
            _print(name, results[name], console)
    threads = torch.get_num_threads()
    precisions = {name: "bfloat16" if CASES[name].bfloat16 else "float32" for name in cases}
    return {
        "cases": results,
        "precisions": precisions,
        "threads": threads,
        "provenance": provenance(),
    }


def _measure_case(case: Case, scratch: Path, advance: Callable[[], None]) -> dict[str, Any]:
    _prepare(case, scratch)
    seconds, rows = _in_new_process(_time_all, case, scratch)
    advance()
    memory = {}
    for name in case.objectives:
        memory[name] = _in_new_process(_peak_bytes, case, scratch, name)
        advance()
    seconds[_TRAINER], memory[_TRAINER] = _in_new_process(_run_trainer, case, scratch)
    advance()
    rows[_TRAINER] = rows["sft"]
    base_s, base_bytes = statistics.median(seconds["sft"]), memory["sft"]
    return {
        name: {
            "steps": case.repeats,
            "step_s": statistics.median(seconds[name]),
            "time_ratio": statistics.median(seconds[name]) / base_s,
            "tokens_per_s": rows["sft"]["tokens"] / statistics.median(seconds[name]),
            "peak_bytes": memory[name],
            "memory_ratio": memory[name] / base_bytes,
            **rows[name],
        }
        for name in seconds
    }


def _in_new_process(function: Any, *arguments: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    # Not multiprocessing's pool, which waits for ever for the result of a killed process.
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise MarsError(
                "a measuring process was ended, as the system does where memory is short: free "
                "some, or choose a smaller --case"
            ) from None


def _prepare(case: Case, scratch: Path) -> None:
    solved = problems("train", 2000, 0)
    create_model(
        PresetModel(preset=case.preset),
        lambda: (text for item in solved for text in (item.question, item.solution)),
        scratch / "model",
        seed=0,
    )


def _time_all(
    case: Case, scratch: Path
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Seconds of each step, and the sizes of a step, by objective."""
    bench = _Bench(case, scratch)
    steps = case.warmup_steps + case.repeats
    seconds: dict[str, list[float]] = {name: [] for name in case.objectives}
    rows = {
        name: {kind: 0.0 for kind in ("rows", "loss_rows", "tokens")}  # noqa: C420 - other keys' type
        for name in case.objectives
    }
    for index, batch in enumerate(_batches(case, scratch, steps)):
        for name in case.objectives:
            started = _now()
            layout = bench.step(name, batch)
            if index >= case.warmup_steps:
                seconds[name].append(_now() - started)
                rows[name]["rows"] += layout.document_BR.numel() / case.repeats
                rows[name]["loss_rows"] += int((layout.target_BR != NO_TARGET).sum()) / case.repeats
                rows[name]["tokens"] += int((batch.document_BL >= 0).sum()) / case.repeats
    return seconds, rows


def _peak_bytes(case: Case, scratch: Path, name: str) -> int:
    before = _held_bytes()
    bench = _Bench(case, scratch)
    for batch in _batches(case, scratch, 2):
        bench.step(name, batch)
    return _most_held_bytes() - before


def _run_trainer(case: Case, scratch: Path) -> tuple[list[float], int]:
    """Seconds of each step of a plain Trainer, and its peak memory."""
    before = _held_bytes()
    steps = case.warmup_steps + case.repeats
    # Trainer needs only a list, though its annotation asks for more.
    batches: Any = [_trainer_inputs(batch) for batch in _batches(case, scratch, steps)]
    clock = _Clock()
    arguments = TrainingArguments(
        output_dir=str(scratch / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=1e-4,
        optim="adamw_torch_fused",
        bf16=case.bfloat16,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    model = load_model(scratch / "model", dtype=torch.float32)
    Trainer(
        model=model,
        args=arguments,
        train_dataset=batches,
        data_collator=lambda items: items[0],  # an item is a batch
        callbacks=[clock],
    ).train()
    return clock.seconds[case.warmup_steps :], _most_held_bytes() - before


def _trainer_inputs(batch: TokenBatch) -> dict[str, torch.Tensor]:
    return {
        "input_ids": batch.input_ids_BL,
        "attention_mask": (batch.document_BL >= 0).long(),
        "labels": batch.input_ids_BL.masked_fill(~batch.response_BL, NO_TARGET),
    }


class _Clock(TrainerCallback):
    """Times a Trainer's steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = _now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(_now() - self._started)


def _batches(case: Case, scratch: Path, count: int) -> list[TokenBatch]:
    """The batches, the same for every objective."""
    source = CorpusSource(count=400)
    config = DataConfig(train=source, max_length=case.max_length, packing=case.packing)
    loader = Loader(
        tokenize(source, load_tokenizer(scratch / "model"), config, scratch / "cache"),
        global_batch_size=case.rows,
        micro_batch_size=case.rows,
        rank=0,
        world_size=1,
        seed=0,
        packing=config.packing,
        max_length=config.max_length,
    )
    return [micro_batches[0] for micro_batches in islice(iter(loader), count)]


def _now() -> float:
    """The time once the device has finished all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _held_bytes() -> int:
    """Bytes held on the device that runs the steps; resets the peak."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return _resident_bytes("VmRSS")


def _most_held_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return _resident_bytes("VmHWM")


def _resident_bytes(field: str) -> int:
    """A size from /proc: getrusage's peak would include the parent's memory before this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise MarsError(f"/proc/self/status has no {field}: this benchmark needs Linux")


class _Bench:
    """A model and an adapter of it on one rank, each with its optimizer, created on first use."""

    def __init__(self, case: Case, scratch: Path) -> None:
        self._bfloat16 = case.bfloat16
        self._directory = scratch / "model"
        self._mask_token_id = read_card(self._directory).mask_token_id
        self._ranks = Ranks.current(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self._engines: dict[str, PlainEngine] = {}

    def step(self, name: str, batch: TokenBatch) -> Layout:
        """One step: layout, forward, backward, update."""
        config = OBJECTIVES[name]
        objective = StageObjective(config, 0, self._mask_token_id)
        layout = objective.layout(batch, 0.5)
        coefficient = row_coefficients(layout, loss_counts(layout), objective.ar_weight(0.5))
        engine = self._engine(config)
        engine.accumulate(layout, coefficient, last=True)
        engine.step(1e-4)
        return layout

    def _engine(self, config: Objective) -> PlainEngine:
        kind = config.type if isinstance(config, DraftObjective) else "model"
        if kind not in self._engines:
            is_draft = isinstance(config, DraftObjective)
            self._engines[kind] = PlainEngine(
                self._draft_step(config) if is_draft else self._model_step(),
                OptimizerConfig(learning_rate=1e-4),
                self._ranks,
                bfloat16=self._bfloat16,
                timer=RankTimer(self._ranks),
            )
        return self._engines[kind]

    def _model_step(self) -> TrainStep:
        return TrainStep(load_model(self._directory, dtype=torch.float32))

    def _draft_step(self, config: DraftObjective) -> DraftStep:
        dtype = torch.bfloat16 if self._bfloat16 else torch.float32
        base = FrozenModel(load_model(self._directory, dtype=dtype, device=self._ranks.device))
        hidden = base.embedding_VH.shape[1]
        card = draft_card(DraftAdapterConfig(), config.max_block_size, hidden, "", "")
        return DraftStep(base, card, fresh_weights(card, base, 0), config)


def _print(name: str, result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{name}: a training step")
    for column in ("objective", "rows", "loss rows", "s", "x SFT", "tok/s", "peak GB", "x SFT"):
        table.add_column(column, justify="left" if column == "objective" else "right")
    for objective, row in result.items():
        table.add_row(
            objective,
            f"{row['rows']:.0f}",
            f"{row['loss_rows']:.0f}",
            f"{row['step_s']:.4f}",
            f"{row['time_ratio']:.2f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['memory_ratio']:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
