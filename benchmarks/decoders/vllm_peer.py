"""vLLM as a peer, and as `vllm-ngram` with drafts that it finds in the text so far.

It imports nothing of this package: the Python of vLLM's environment runs it.
"""

import importlib
import json
import os
import sys
import time
from ctypes.util import find_library
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; several of them are loaded at a time
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
_NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}


def main() -> None:
    """Argument: the settings (`decoders/__init__.py`)."""
    replies, settings = own_stdout(), json.loads(sys.argv[1])
    drafts = {"speculative_config": _NGRAM} if settings["peer"] == "vllm-ngram" else {}
    llm = load(settings, **drafts)
    say(replies, {"peer": settings["peer"], "version": version()})
    for line in sys.stdin:
        say(replies, answer(llm, json.loads(line)))


def own_stdout() -> TextIO:
    """Where replies go; vLLM's own prints, which must not mix with them, go to stderr from here
    on."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def say(replies: TextIO, reply: dict[str, Any]) -> None:
    """Write one line, and let it go."""
    print(json.dumps(reply), file=replies, flush=True)


def version() -> str:
    """Of vLLM."""
    vllm: Any = importlib.import_module("vllm")
    return vllm.__version__


def load(settings: dict[str, Any], **more: Any) -> Any:
    """vLLM's engine as this benchmark measures it, with more of its arguments."""
    _give_threads(settings["threads"])
    vllm: Any = importlib.import_module("vllm")
    return vllm.LLM(
        model=settings["checkpoint"],
        dtype=settings["dtype"],
        max_model_len=settings["max_context"],
        enable_prefix_caching=False,
        **more,
    )


def _give_threads(threads: int) -> None:
    """Let vLLM have as many cores as every peer. By itself it leaves one of them to its scheduler,
    which of two cores is half (`VLLM_CPU_OMP_THREADS_BIND=auto` in the environment brings that
    back). It asks for two libraries to be loaded first, if they are there."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    found = [str(openmp)] if openmp.exists() else []
    if malloc := find_library("tcmalloc_minimal"):
        found.append(malloc)
    os.environ.setdefault("LD_PRELOAD", ":".join(found))


def answer(llm: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Decode the task's prompts, a number of them at a time. vLLM's own process learns of the next
    one while it is in the step after that in which a place became free."""
    vllm: Any = importlib.import_module("vllm")
    sampling = vllm.SamplingParams(
        max_tokens=task["max_new_tokens"],
        temperature=task["temperature"],
        stop_token_ids=task["stop_ids"],
        ignore_eos=not task["stop_ids"],
        detokenize=False,
    )
    prompts = [ids for batch in task["batches"] for ids in batch]
    engine, tokens = llm.llm_engine, {}
    started, asked = time.perf_counter(), 0
    while len(tokens) < len(prompts):
        while asked < min(len(prompts), len(tokens) + task["places"]):
            engine.add_request(str(asked), {"prompt_token_ids": prompts[asked]}, sampling)
            asked += 1
        for output in engine.step():
            if output.finished:
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": [tokens[index] for index in range(len(prompts))]}


if __name__ == "__main__":
    main()
