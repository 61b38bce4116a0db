"""vLLM engines on tiny models: plain, and with the plug-in."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The engine in this process, on as many threads as the tests have, without a word to the world.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_V2_MODEL_RUNNER="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)

# An engine that is collected takes the process group of all others with it.
_KEPT: list[Any] = []
PROPOSER = "mars_ray.vllm.proposer.MarsProposer"


def engine(model: Path, **arguments: Any) -> Any:
    """vLLM without speculation."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
        "max_num_seqs": 16,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 64 << 20,
    }
    _KEPT.append(LLM(**settings | arguments))
    return _KEPT[-1]


def mars_engine(model: Path, masks: int = 4, *, mars: Any = None, **arguments: Any) -> Any:
    """vLLM with the plug-in, all masks in every step; `mars` is its part of `additional_config`."""
    speculative = {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": 2 * masks,
    }
    additional = {"mars": {"masks_by_running": [[1, masks]]} | (mars or {})}
    return engine(model, speculative_config=speculative, additional_config=additional, **arguments)


def answers(llm: Any, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    """Token ids of each prompt's answer."""
    from vllm import SamplingParams

    # Copies, because vLLM may change what it is given.
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    params = SamplingParams(**{"temperature": 0.0, "detokenize": False} | sampling)
    return [list(out.outputs[0].token_ids) for out in llm.generate(given, params, use_tqdm=False)]


def counts(llm: Any) -> dict[str, Any]:
    """What the plug-in has counted since the start."""
    return llm.collective_rpc("mars_counts")[0]


def tokens_per_forward(before: dict[str, Any], after: dict[str, Any]) -> float:
    """T/F between two counts."""
    tokens, forwards = (
        after["total"][key] - before["total"][key] for key in ("tokens", "forwards")
    )
    return tokens / forwards
