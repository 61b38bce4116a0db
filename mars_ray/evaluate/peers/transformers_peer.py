"""transformers as a peer: `generate` on a padded batch, whose rows wait for the longest.

As `transformers-lookup` its drafts are found in the text so far, for one sequence at a time.
"""

import json
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

# Peers of this script that decode one sequence at a time.
ALONE = ("transformers-lookup",)
_DRAFTS = 4


def main() -> None:
    """Argument: the settings (`peers/__init__.py`)."""
    settings = json.loads(sys.argv[1])
    model = load(settings["checkpoint"], settings["dtype"])
    drafts = {"prompt_lookup_num_tokens": _DRAFTS} if settings["peer"] in ALONE else {}
    hello = {"peer": settings["peer"], "version": transformers.__version__}
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line) | drafts)), flush=True)


def load(checkpoint: str, dtype: str) -> PreTrainedModel:
    """The model as transformers loads it, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    return model.to(device).eval()


@torch.inference_mode()
def answer(model: PreTrainedModel, task: dict[str, Any]) -> dict[str, Any]:
    """Decode the task's batches one after the other."""
    config = GenerationConfig(
        max_new_tokens=task["max_new_tokens"],
        **sampling(task["temperature"]),
        prompt_lookup_num_tokens=task.get("prompt_lookup_num_tokens"),
        # -1 means that no token ends a sequence; without it the model's own token would.
        eos_token_id=task["stop_ids"] or [-1],
        pad_token_id=0,
    )
    started = time.perf_counter()
    tokens = [ids for batch in task["batches"] for ids in _generate(model, batch, config)]
    return {"seconds": time.perf_counter() - started, "tokens": tokens}


def sampling(temperature: float) -> dict[str, Any]:
    """The settings of `generate` for a temperature and all tokens; 0 is greedy."""
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


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
