"""This package's engine as a peer."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch

from mars_ray import __version__
from mars_ray.config.decode import EngineConfig
from mars_ray.core.tree import Choice
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.warm_up import StepTimer
from mars_ray.evaluate.bench import mars_answer
from mars_ray.model.shape import shape_of_config

# Passes over a block in one measurement of the bandwidth.
_READS = 10


def main() -> None:
    """Argument: the settings (`decoders/__init__.py`)."""
    settings = json.loads(sys.argv[1])
    own = ("max_batch", "max_context", "dtype", "draft_adapter", "window_control")
    config = EngineConfig.model_validate(
        {"max_step_tokens": 2048, "prefix_cache": False} | {key: settings[key] for key in own}
    )
    engine, _ = load_engine(settings["checkpoint"], config)
    # Computed from the shape, because the engine has taken matrices out of the model.
    weights = shape_of_config(engine.model.config).parameters * engine.model.dtype.itemsize
    hello = {
        "peer": "mars-ray",
        "version": __version__,
        "weight_bytes": weights,
        "draft_adapter": engine.adapter_name,
        "info": str(engine.info),
    }
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if "step" in task:
            sequences, positions = task["step"]
            timer = StepTimer(engine._backend, engine.card, engine.config)
            with engine._torch_threads():
                seconds = timer.seconds(timer.decoding(sequences * positions, sequences))
            print(json.dumps({"seconds": seconds}), flush=True)
        elif "read" in task:
            seconds = _read_seconds(task["read"], engine.model.device)
            print(json.dumps({"seconds": seconds}), flush=True)
        else:
            print(json.dumps(answer(engine, task)), flush=True)


def _read_seconds(count: int, device: torch.device) -> float:
    """The least seconds in which all threads read so many bytes: as many as the weights have, of
    which a cache holds the same part. On CPUs they lie in huge pages, as our engine's do."""
    half = count // 8
    if device.type == "cpu":
        memory = mmap(-1, 8 * half, MAP_PRIVATE | MAP_ANONYMOUS)
        memory.madvise(MADV_HUGEPAGE)
        block = torch.frombuffer(memory, dtype=torch.float32)
    else:
        block = torch.empty(2 * half, device=device)
    # Written to, because untouched pages all map to one page of zeros, which stays in a cache.
    block.fill_(1)
    times = []
    for _ in range(_READS):
        # Which of them reads faster depends on the processor.
        for read in (block.max, partial(torch.dot, block[:half], block[half:])):
            started = time.perf_counter()
            read().item()
            times.append(time.perf_counter() - started)
    return min(times)


def answer(engine: Engine, task: dict[str, Any]) -> dict[str, Any]:
    """Decode the task's batches one after the other, in its mode."""
    if "replayed" not in task:
        return mars_answer(engine, task)
    prompts = (tuple(ids) for batch in task["batches"] for ids in batch)
    with replaying(engine, dict(zip(prompts, task["replayed"], strict=True)), task["drafts"]):
        return mars_answer(engine, task)


@contextmanager
def replaying(
    engine: Engine, answers: dict[tuple[int, ...], list[int]], count: int
) -> Iterator[None]:
    """Gives each step so many drafts of these answers, by prompt. They are always right where
    greedy or seeded decoding gives the answers again: the most that this engine can do with so many
    drafts a step."""
    prepare = engine._prepare

    def prepare_with_drafts() -> None:
        prepare()
        for sequence in engine._scheduler.running_sequences():
            if sequence.forwards:
                prompt = sequence.request.prompt
                first = sequence.committed - len(prompt)
                # The answer's last token needs none.
                drafts = answers[prompt][:-1][first : first + count]
                sequence.set_drafts(drafts, [1.0] * len(drafts))
                sequence.choice = Choice(len(drafts), (0,) * (1 + len(drafts)))

    engine._prepare = prepare_with_drafts
    try:
        yield
    finally:
        engine._prepare = prepare


if __name__ == "__main__":
    main()
