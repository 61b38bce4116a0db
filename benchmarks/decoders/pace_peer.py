"""AMD PACE as a peer: `generate` on a padded batch, whose rows wait for the longest.

It imports nothing of this package: the Python of its environment (`tools/pace_env.sh`) runs it.
"""

import importlib
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    """Argument: the settings (`decoders/__init__.py`)."""
    settings = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # its own prints, which must not mix with replies
    torch: Any = importlib.import_module("torch")
    pace: Any = importlib.import_module("pace")
    llm: Any = importlib.import_module("pace.llm")
    # Its cache by default, the one that has both dtypes.
    model = llm.LLMModel(
        settings["checkpoint"], dtype=getattr(torch, settings["dtype"]), disable_tqdm=True
    )
    print(json.dumps({"peer": "pace", "version": pace.__version__}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(model, llm, json.loads(line))), file=replies, flush=True)


def _answer(model: Any, llm: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Decode the task's batches one after the other."""
    sampled = {"do_sample": True, "temperature": task["temperature"]}
    config = {
        "max_new_tokens": task["max_new_tokens"],
        "eos_token_id": task["stop_ids"] or None,
        "ignore_eos": not task["stop_ids"],
        **(sampled if task["temperature"] else {}),
    }
    started = time.perf_counter()
    tokens = [
        ids
        for batch in task["batches"]
        for ids in _generate(model, batch, llm.SamplingConfig(**config), set(task["stop_ids"]))
    ]
    return {"seconds": time.perf_counter() - started, "tokens": tokens}


def _generate(model: Any, prompts: list[list[int]], config: Any, stops: set[int]) -> Any:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    longest = max(map(len, prompts))
    padding = [longest - len(ids) for ids in prompts]
    padded = [[0] * pad + ids for pad, ids in zip(padding, prompts, strict=True)]
    seen = [[0] * pad + [1] * len(ids) for pad, ids in zip(padding, prompts, strict=True)]
    inputs = {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(seen)}
    output = model.generate(transformers.BatchEncoding(inputs), config)
    for row in output.output_token_ids.tolist():
        ids = row[longest:]
        yield ids[: next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))]


if __name__ == "__main__":
    main()
