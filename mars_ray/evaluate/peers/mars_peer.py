"""This package's engine as a peer."""

import json
import sys
import time
from typing import Any

import torch
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from mars_ray import __version__
from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import Mode
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Completion, Request
from mars_ray.model.shape import shape_of_config

_MODE: TypeAdapter[Any] = TypeAdapter(Mode)


def main() -> None:
    """Arguments: checkpoint, dtype, longest sequence, largest batch, draft adapter if any."""
    checkpoint, dtype, max_context, max_batch = sys.argv[1:5]
    config = EngineConfig.model_validate(
        {
            "max_batch": int(max_batch),
            "max_context": int(max_context),
            "max_step_tokens": 2048,
            "dtype": dtype,
            "prefix_cache": False,
            "draft_adapter": next(iter(sys.argv[5:]), None),
        }
    )
    engine, _ = load_engine(checkpoint, config)
    hello = {
        "peer": "mars-ray",
        "version": __version__,
        "roofline": _roofline(engine.model),
        "draft_adapter": engine.adapter_name,
    }
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if "step" in task:
            print(json.dumps({"seconds": engine.time_step(*task["step"])}), flush=True)
        else:
            print(json.dumps(answer(engine, task)), flush=True)


def _roofline(model: PreTrainedModel) -> dict[str, float]:
    """The least bytes that a step must read, and the bytes per second that this device copies."""
    # Written to, because untouched pages all map to one page of zeros, which stays in a cache.
    block = torch.ones(2**28, dtype=torch.uint8, device=model.device)
    target = torch.empty_like(block)
    times = []
    for _ in range(10):
        started = time.perf_counter()
        target.copy_(block)
        if block.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    # Computed from the shape, because the engine has taken matrices out of the model.
    weights = shape_of_config(model.config).parameters * model.dtype.itemsize
    return {"weight_bytes": weights, "copy_bytes_per_s": 2 * block.numel() / min(times)}


def answer(engine: Engine, task: dict[str, Any]) -> dict[str, Any]:
    """Decode the task's batches one after the other, in its mode."""
    mode = _MODE.validate_python(task["mode"])
    limit, stops = task["max_new_tokens"], frozenset(task["stop_ids"])
    completions: list[Completion] = []
    steps = rows = 0
    started, in_model = time.perf_counter(), engine.model_seconds
    for batch in task["batches"]:
        done, own_steps, own_rows = _run(
            engine,
            [
                Request(str(index), tuple(ids), mode, Sampling(), limit, stops)
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
