"""transformers' continuous batching as a peer: `generate_batch`, its manager kept between tasks."""

import json
import sys
import time
from typing import Any

import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from mars_ray.evaluate.bench import load_transformers, transformers_sampling


def main() -> None:
    """Argument: the settings (`decoders/__init__.py`)."""
    settings = json.loads(sys.argv[1])
    model = load_transformers(settings["checkpoint"], settings["dtype"])
    version = {"peer": "transformers-continuous", "version": transformers.__version__}
    print(json.dumps(version), flush=True)
    # Sized for the largest batch: a manager kept between tasks keeps the first task's cache.
    size = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=settings["max_batch"] * (settings["max_context"] // 32 + 1),
        max_batch_tokens=2048,
        allow_block_sharing=False,
    )
    for line in sys.stdin:
        print(json.dumps(_answer(model, json.loads(line), size)), flush=True)


def _answer(
    model: PreTrainedModel, task: dict[str, Any], size: ContinuousBatchingConfig
) -> dict[str, Any]:
    config = GenerationConfig(
        max_new_tokens=task["max_new_tokens"],
        **transformers_sampling(task["temperature"]),
        # -1 means that no token ends a sequence.
        eos_token_id=task["stop_ids"] or -1,
        pad_token_id=0,
    )
    started = time.perf_counter()
    tokens: list[list[int]] = []
    for batch in task["batches"]:
        outputs: dict[str, Any] = model.generate_batch(  # type: ignore[operator]
            batch,
            generation_config=config,
            continuous_batching_config=size,
            persistent_manager=True,
        )
        tokens += [output.generated_tokens for output in outputs.values()]
    return {"seconds": time.perf_counter() - started, "tokens": tokens}


if __name__ == "__main__":
    main()
