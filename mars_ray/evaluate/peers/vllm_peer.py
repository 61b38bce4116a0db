"""vLLM as a peer. It imports nothing of this package: the Python of vLLM's environment runs it."""

import importlib
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main() -> None:
    """Arguments: checkpoint, dtype, longest sequence."""
    # vLLM's own prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    vllm: Any = importlib.import_module("vllm")

    checkpoint, dtype, max_context = sys.argv[1:4]
    llm = vllm.LLM(
        model=checkpoint,
        dtype=dtype,
        max_model_len=int(max_context),
        enable_prefix_caching=False,
    )
    print(json.dumps({"peer": "vllm", "version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(llm, vllm, json.loads(line))), file=answers, flush=True)


def _answer(llm: Any, vllm: Any, task: dict[str, Any]) -> dict[str, Any]:
    sampling = vllm.SamplingParams(
        max_tokens=task["max_new_tokens"],
        temperature=0,
        stop_token_ids=task["stop_ids"],
        ignore_eos=not task["stop_ids"],
        detokenize=False,
    )
    batches = [[{"prompt_token_ids": ids} for ids in batch] for batch in task["batches"]]
    started = time.perf_counter()
    outputs = [
        output for batch in batches for output in llm.generate(batch, sampling, use_tqdm=False)
    ]
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": [list(o.outputs[0].token_ids) for o in outputs]}


if __name__ == "__main__":
    main()
