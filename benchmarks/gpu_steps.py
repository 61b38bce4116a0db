"""What an engine's steps cost on the GPU at hand, by rows, masks and sequences.

    python benchmarks/gpu_steps.py OUTPUT.json MODEL ...

MODEL is a preset (qwen2.5-0.5b, qwen2.5-7b), whose weights are random, or a model's directory. The
adapter is random too: LoRA of rank 32 on all matrices, and a head. Each shape of a step is timed
with CUDA graphs and our kernels, and for one sequence without; Python and the copy to the host are
included. The result is written after every model, and models that it has are left out.
"""

import json
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from mars_ray.config.decode import EngineConfig
from mars_ray.core.draft_head import DraftHead
from mars_ray.decode.engine import Engine
from mars_ray.decode.warm_up import StepTimer
from mars_ray.model.create import SHAPES, preset_config
from mars_ray.model.directory import PLAIN
from mars_ray.model.draft_adapter import DraftAdapter, DraftCard, Lora
from mars_ray.provenance import provenance

BATCHES = (1, 4, 16, 64)
POSITIONS = (1, 4, 9)  # rows of each sequence
CONTEXTS = (128, 1000)
DEPTH, RANK = 4, 32
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    """Measure the models that the result lacks."""
    output, *names = sys.argv[1:]
    path = Path(output)
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"models": {}}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result |= {"bytes_per_s": _bandwidth(device), "provenance": provenance()}
    for name in names:
        key = Path(name).name
        if key not in result["models"]:
            result["models"][key] = _measured(name, device)
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(key, json.dumps(result["models"][key]), flush=True)


def _bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy; the best of several."""
    source = torch.zeros(1 << (31 if device.type == "cuda" else 26), dtype=torch.uint8).to(device)
    target, seconds = torch.empty_like(source), []
    for _ in range(8):
        _synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * len(source) / min(seconds)


def _measured(name: str, device: torch.device) -> dict[str, Any]:
    started = time.perf_counter()
    model = _model(name, device)
    adapter = _adapter(model)
    read = sum(weight.nbytes for weight in model.parameters())
    embedding: Any = model.get_input_embeddings()
    if not model.config.tie_word_embeddings:
        read -= embedding.weight.nbytes  # a few of its rows are read
    cases = []
    for backend in ("triton", "dense") if device.type == "cuda" else ("auto",):
        is_graphs = backend != "dense"
        config = EngineConfig(
            max_batch=max(BATCHES) if is_graphs else 1,
            max_context=2048,
            cache_bytes=8 << 30 if device.type == "cuda" else None,
            attention_backend=backend,
            prefix_cache=False,
        )
        engine = Engine(model, replace(PLAIN, block_size=DEPTH), config, adapter, "random")
        timer = StepTimer(engine._backend, engine.card, config)
        batches = BATCHES if is_graphs else (1,)
        cases += [
            {"graphs": is_graphs} | _case(timer, *shape)
            for shape in product(batches, POSITIONS, CONTEXTS)
        ]
    return {"bytes": read, "cases": cases, "seconds_in_all": time.perf_counter() - started}


def _case(timer: StepTimer, sequences: int, rows: int, context: int) -> dict[str, Any]:
    """Seconds of a step of so many sequences with so many rows each, without and with masks."""

    def seconds(*, masks: bool) -> float:
        shape = rows * sequences, sequences, context
        return timer.least(lambda: timer.decoding(*shape, masks=masks))

    return {
        "sequences": sequences,
        "rows": rows,
        "context": context,
        "seconds": seconds(masks=False),
        "with_masks": seconds(masks=True) if rows > 1 else None,
    }


def _model(name: str, device: torch.device) -> PreTrainedModel:
    if name not in SHAPES:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        return model.to(device).eval()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen2ForCausalLM(preset_config(name, SHAPES[name].rows or 0))
    torch.set_default_dtype(torch.float32)
    return model.eval()


def _adapter(model: PreTrainedModel) -> DraftAdapter:
    size = model.config.hidden_size

    def numbers(*shape: int) -> torch.Tensor:
        return 0.01 * torch.randn(shape, device=model.device, dtype=model.dtype)

    lora = {
        name: Lora(numbers(RANK, module.in_features), numbers(module.out_features, RANK))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith(_TARGETS)
    }
    inner = 2 * size
    head = DraftHead(
        numbers(inner, size), numbers(inner, size), numbers(DEPTH, inner), numbers(size, inner)
    )
    card = DraftCard(
        depths=DEPTH,
        base="random",
        base_fingerprint="",
        rank=RANK,
        alpha=2.0 * RANK,
        targets=_TARGETS,
        head_size=inner,
        candidates=64,
    )
    return DraftAdapter(card, numbers(DEPTH, size), lora, head)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
