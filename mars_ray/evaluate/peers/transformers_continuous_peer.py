"""transformers' continuous batching as a peer: `generate_batch`, its manager kept between tasks."""

import json
import sys
import time
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)


def main() -> None:
    """Arguments: checkpoint, dtype, longest sequence."""
    checkpoint, dtype, max_context = sys.argv[1:4]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    model.to(device).eval()
    version = {"peer": "transformers-continuous", "version": transformers.__version__}
    print(json.dumps(version), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(model, json.loads(line), int(max_context))), flush=True)


def _answer(model: PreTrainedModel, task: dict[str, Any], max_context: int) -> dict[str, Any]:
    config = GenerationConfig(
        max_new_tokens=task["max_new_tokens"],
        do_sample=False,
        # -1: no token ends a sequence.
        eos_token_id=task["stop_ids"] or -1,
        pad_token_id=0,
    )
    size = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=len(task["batches"][0]) * (max_context // 32 + 1),
        max_batch_tokens=2048,
        allow_block_sharing=False,
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
