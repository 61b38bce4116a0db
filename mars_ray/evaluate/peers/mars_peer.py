"""This package's engine as a peer."""

import json
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch
from pydantic import TypeAdapter

from mars_ray import __version__
from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import Mode
from mars_ray.decode.draft_model import Drafter
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Completion, Request
from mars_ray.decode.sequence import Sequence
from mars_ray.model.shape import shape_of_config

_MODE: TypeAdapter[Any] = TypeAdapter(Mode)
# Passes over a block in one measurement of the bandwidth.
_READS = 10


def main() -> None:
    """Argument: the settings (`peers/__init__.py`)."""
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
    }
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if "step" in task:
            print(json.dumps({"seconds": engine.time_step(*task["step"])}), flush=True)
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


class OracleDrafter(Drafter):
    """Drafts that are always right, where greedy or seeded decoding gives `exact`'s answers again:
    the most that this engine can do with so many drafts a step."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        """The answers by prompt."""
        self._answers = answers

    def extend(
        self, wanting: Iterable[tuple[Sequence, int]], meanwhile: Callable[[], None]
    ) -> None:
        """Set the drafts of each sequence. The answer's last token needs none."""
        for sequence, count in wanting:
            prompt = sequence.request.prompt
            first = sequence.committed - len(prompt)
            drafts = self._answers[prompt][:-1][first : first + count]
            sequence.set_drafts(drafts, [1.0] * len(drafts))
            sequence.extended = sequence.forwards


def answer(engine: Engine, task: dict[str, Any]) -> dict[str, Any]:
    """Decode the task's batches one after the other, in its mode."""
    mode = _MODE.validate_python(task["mode"])
    if "replayed" in task:
        prompts = (tuple(ids) for batch in task["batches"] for ids in batch)
        engine.drafter = OracleDrafter(dict(zip(prompts, task["replayed"], strict=True)))
    limit, stops = task["max_new_tokens"], frozenset(task["stop_ids"])
    sampling = Sampling(temperature=task["temperature"])
    completions: list[Completion] = []
    steps = rows = 0
    started, in_model = time.perf_counter(), engine.model_seconds
    for batch in task["batches"]:
        done, own_steps, own_rows = _run(
            engine,
            [
                Request(str(index), tuple(ids), mode, sampling, limit, stops)
                for index, ids in enumerate(batch)
            ],
        )
        completions += done
        steps += own_steps
        rows += own_rows
    return {
        "seconds": time.perf_counter() - started,
        "tokens": [list(completion.tokens) for completion in completions],
        "forwards": sum(completion.forwards for completion in completions),
        "steps": steps,
        "rows": rows,
        "model_seconds": engine.model_seconds - in_model,
    }


def _run(engine: Engine, requests: list[Request]) -> tuple[list[Completion], int, int]:
    """The completions, the number of engine steps, and the number of positions forwarded."""
    for request in requests:
        engine.submit(request)
    completions: dict[str, Completion] = {}
    steps = rows = 0
    while engine.has_work:
        for event in engine.step():
            if event.completion:
                completions[event.request_id] = event.completion
        steps += 1
        rows += engine.last_rows
    return [completions[request.id] for request in requests], steps, rows


if __name__ == "__main__":
    main()
