"""transformers as a peer: `generate` on a padded batch, whose rows wait for the longest."""

import json
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel


def main() -> None:
    """Arguments: checkpoint, dtype. The rest are ignored, because the cache grows as needed."""
    checkpoint, dtype, *_ = sys.argv[1:]
    model = load(checkpoint, dtype)
    print(json.dumps({"peer": "transformers", "version": transformers.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), flush=True)


def load(checkpoint: str, dtype: str) -> PreTrainedModel:
    """The model as transformers loads it, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    return model.to(device).eval()


@torch.inference_mode()
def answer(model: PreTrainedModel, task: dict[str, Any]) -> dict[str, Any]:
    """Decode the task's batches one after the other, greedily."""
    config = GenerationConfig(
        max_new_tokens=task["max_new_tokens"],
        do_sample=False,
        # -1 means that no token ends a sequence; without it the model's own token would.
        eos_token_id=task["stop_ids"] or [-1],
        pad_token_id=0,
    )
    started = time.perf_counter()
    tokens = [ids for batch in task["batches"] for ids in _generate(model, batch, config)]
    return {"seconds": time.perf_counter() - started, "tokens": tokens}


def _generate(
    model: PreTrainedModel, prompts: list[list[int]], config: GenerationConfig
) -> list[list[int]]:
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    seen = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    output: Any = model.generate(  # type: ignore[operator]
        padded.to(model.device), attention_mask=seen.to(model.device), generation_config=config
    )
    return [_until_stop(row[longest:].tolist(), config.eos_token_id) for row in output]


def _until_stop(tokens: list[int], stops: list[int]) -> list[int]:
    """The tokens up to the first stop token, without the padding behind it."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


if __name__ == "__main__":
    main()
