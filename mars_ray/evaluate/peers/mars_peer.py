"""This package's engine as a peer."""

import json
import sys
import time
from typing import Any

from pydantic import TypeAdapter

from mars_ray import __version__
from mars_ray.config.decode import EngineConfig, Mode, Sampling
from mars_ray.decode.engine import Engine, load_engine
from mars_ray.decode.request import Completion, Request

_MODE: TypeAdapter[Any] = TypeAdapter(Mode)


def main() -> None:
    """Arguments: checkpoint, dtype, longest sequence, largest batch."""
    checkpoint, dtype, max_context, max_batch = sys.argv[1:5]
    config = EngineConfig.model_validate(
        {
            "max_batch": int(max_batch),
            "max_context": int(max_context),
            "max_step_tokens": 2048,
            "dtype": dtype,
            "prefix_cache": False,
        }
    )
    engine, _ = load_engine(checkpoint, config)
    print(json.dumps({"peer": "mars-ray", "version": __version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(engine, json.loads(line))), flush=True)


def _answer(engine: Engine, task: dict[str, Any]) -> dict[str, Any]:
    mode = _MODE.validate_python(task["mode"])
    requests = [
        Request(
            str(index),
            tuple(ids),
            mode,
            Sampling(),
            task["max_new_tokens"],
            frozenset(task["stop_ids"]),
        )
        for index, ids in enumerate(task["prompts"])
    ]
    started = time.perf_counter()
    completions, steps, rows = _run(engine, requests)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "tokens": [list(completions[request.id].tokens) for request in requests],
        "forwards": sum(completion.forwards for completion in completions.values()),
        "steps": steps,
        "rows": rows,
    }


def _run(engine: Engine, requests: list[Request]) -> tuple[dict[str, Completion], int, int]:
    """Completions, engine steps, positions forwarded."""
    for request in requests:
        engine.submit(request)
    completions, steps, rows = {}, 0, 0
    while engine.has_work:
        for event in engine.step():
            if event.completion:
                completions[event.request_id] = event.completion
        steps += 1
        rows += engine.last_rows
    return completions, steps, rows


if __name__ == "__main__":
    main()
