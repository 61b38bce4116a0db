"""Computes the GPUs and hours that the training of a model takes: the table in docs/training.md.

    python benchmarks/sizing.py           rewrite it
    python benchmarks/sizing.py --check   exit code 1 if it differs from this script's output

Memory is the estimate by which `mars_ray.train.memory` refuses a stage. Hours are FLOPs over the
GPUs' FLOPs per second, both computed below; nothing here was measured on a GPU.
"""

import re
import sys
from pathlib import Path

from mars_ray.config.load import load_job
from mars_ray.config.train import LoraConfig, StageConfig, TrainJob
from mars_ray.model.shape import ModelShape
from mars_ray.train.memory import MemoryEstimate, RowSize, estimate
from mars_ray.train.throughput import ModelFlops

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "training.md"
MARKED = re.compile(r"(<!-- sizing -->\n).*?(<!-- /sizing -->)", re.DOTALL)

SHAPES = {
    "0.5b": ModelShape(151_936, 896, 4_864, 24, 14, 896, 128, True, 0, True),
    "7b": ModelShape(152_064, 3_584, 18_944, 28, 28, 3_584, 512, True, 0, False),
    "32b": ModelShape(152_064, 5_120, 27_648, 64, 40, 5_120, 1_024, True, 0, False),
}
GPU_BYTES = 80e9
# Share of a GPU that is left beside CUDA, its libraries and fragmentation.
USABLE_SHARE = 0.85
PEAK_FLOPS = 989e12  # H100 SXM, bfloat16, dense, by its data sheet
ASSUMED_UTILISATION = 0.35
WORKERS = (1, 2, 4, 8, 16, 32, 64)
# The paper's runs (arXiv 2604.07023): about 2 million conversations, 5 epochs per stage. Lengths
# are assumed: 350 tokens each, of which 220 belong to a response.
CONVERSATIONS, EPOCHS, TOKENS, RESPONSE = 2_000_000, 5, 350, 220
ROW = RowSize(512, 512 * RESPONSE // TOKENS)
GIB = 1 << 30

WAYS = {
    "ZeRO 1": ({"type": "deepspeed", "zero_stage": 1}, None),
    "ZeRO 3": ({"type": "deepspeed", "zero_stage": 3}, None),
    "ZeRO 3, offload": ({"type": "deepspeed", "zero_stage": 3, "offload": "all"}, None),
    "torch, LoRA": ({"type": "torch"}, LoraConfig()),
}


def table() -> list[str]:
    """A line for each model and method, with the smallest sufficient number of GPUs."""
    lines = [
        "| model | how | GPUs | GiB a GPU | GiB of a node, a GPU | hours AR | hours MARS |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, shape in SHAPES.items():
        job = load_job(ROOT / "jobs" / f"train-qwen2.5-{name}.toml")
        assert isinstance(job, TrainJob)
        lines += [line for way in WAYS if (line := _line(name, shape, job, way))]
    return lines


def _line(name: str, shape: ModelShape, job: TrainJob, way: str) -> str | None:
    engine, lora = WAYS[way]
    content = job.model_dump() | {"engine": engine}
    changed = TrainJob.model_validate(content)
    stage = changed.stages["mars"].model_copy(update={"lora": lora})
    for workers in WORKERS:
        needs = _needs(shape, changed, stage, workers)
        if needs.device <= GPU_BYTES * USABLE_SHARE:
            hours = [_hours(shape, workers, masks=masks) for masks in (0, RESPONSE)]
            return (
                f"| {name} | {way} | {workers} | {needs.device / GIB:.0f} | "
                f"{needs.offloaded / GIB:.0f} | {hours[0]:,.0f} | {hours[1]:,.0f} |"
            )
    return None


def _needs(shape: ModelShape, job: TrainJob, stage: StageConfig, workers: int) -> MemoryEstimate:
    return estimate(shape, job, stage, ROW, workers, on_cuda=True)


def _hours(shape: ModelShape, workers: int, masks: int) -> float:
    """Hours of one stage; `masks` is the number of mask rows besides a conversation's tokens."""
    flops = ModelFlops(
        shape.body_weights, shape.vocabulary * shape.hidden, shape.layers * shape.query_size
    )
    prompt = TOKENS - RESPONSE
    pairs = TOKENS * (TOKENS + 1) / 2 + masks * (prompt + TOKENS) / 2
    one = flops.step(TOKENS + masks, RESPONSE + masks, pairs)
    return CONVERSATIONS * EPOCHS * one / (workers * PEAK_FLOPS * ASSUMED_UTILISATION) / 3600


def main() -> int:
    """Rewrite, or with `--check` compare."""
    old = PAGE.read_text()
    new = MARKED.sub(lambda match: match[1] + "\n".join(table()) + "\n" + match[2], old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
