"""What has run where: the table of docs/reference/support-matrix.md, for render.py."""

import json
from pathlib import Path
from typing import Any

from lib.tables import machine

_CPU, _GPU = "two cores", "one GPU"
# Part, model, engine and dtype, where; and the result that measured it, "tests", or None if it has
# never run.
_ROWS = (
    ("decoding", "SmolLM2-135M", "ours, bfloat16", _CPU, "smollm2_decode"),
    ("same words", "SmolLM2-135M", "ours, bfloat16", _CPU, "smollm2_identity"),
    ("decoding", "Qwen2.5-0.5B shape, random weights", "ours, bfloat16", _CPU, "decode_0_5b"),
    ("steps", "SmolLM2-135M; 0.5B and 7B shapes", "ours, bfloat16", _GPU, "gpu_step"),
    ("same words", "SmolLM2-135M", "ours, bfloat16", _GPU, "smollm2_identity_gpu"),
    ("whole answers", "any", "ours", _GPU, None),
    ("plug-in", "SmolLM2-135M", "vLLM 0.32, float32", _CPU, "vllm_plugin"),
    ("plug-in", "SmolLM2-135M", "vLLM 0.32, bfloat16", _CPU, "vllm_bfloat16"),
    ("plug-in", "any", "vLLM", _GPU, None),
    ("adapter's training", "SmolLM2-135M", "torch, bfloat16", _GPU, "adapter_training_gpu"),
    ("adapter's training", "SmolLM2-135M", "Ray Train", _CPU, "adapter_parts"),
    ("MARS training", "5M parameters, GSM8K", "Ray Train, float32", _CPU, "gsm8k"),
    ("thresholds", "SmolLM2-135M by MARS", "ours, bfloat16", _CPU, "mars_frontier"),
    ("MARS training", "0.5B to 32B (the jobs for GPUs)", "DeepSpeed", _GPU, None),
    ("service", "tiny", "ours", _CPU, "serve_load"),
    ("service", "SmolLM2-135M, two replicas, policy", "ours", _CPU, "live"),
    ("service, threshold", "SmolLM2-135M by MARS, policy", "ours", _CPU, "trade"),
    ("service", "tiny", "vLLM", _CPU, "tests"),
    ("service", "any", "ours or vLLM", _GPU, None),
    ("local cluster of three nodes", "tiny", "Ray 2.60", _CPU, "tests"),
    ("cloud cluster files", "-", "Ray's schema alone", "AWS, Google Cloud", None),
    ("Helm chart", "-", "rendered, held to KubeRay's schemas", "Kubernetes", None),
    ("images", "-", "Dockerfile read by tests", "Docker", None),
)


def matrix(results: Path) -> list[str]:
    """A line for each part: measured, tested or never run."""
    lines = ["| part | model | with | where | state |", "|---|---|---|---|---|"]
    for *cells, result in _ROWS:
        state = {None: "**never run**", "tests": "tested"}.get(result)
        if state is None:
            state = f"measured: {_facts(json.loads((results / f'{result}.json').read_text()))}"
        lines.append(f"| {' | '.join(cells)} | {state} |")
    return lines


def _facts(result: dict[str, Any]) -> str:
    # Of answers compared the newest part has provenance of its own.
    half = result.get("bfloat16")
    own = half if isinstance(half, dict) and "provenance" in half else result
    return machine(own["provenance"])
