"""Where the threshold is capacity: `python benchmarks/capacity.py` writes results/capacity.json.

Tokens per second of a replica by batch and quality level, from measured step costs where there are
any and from stated arithmetic where there are none; render.py makes the tables of
docs/autoscaling.md. The service models themselves go to results/service_*.json, for the simulator.
"""

import json
from pathlib import Path
from typing import Any

from mars_ray.core.frontier import Frontier
from mars_ray.provenance import provenance
from mars_ray.scaling.measured import (
    acceptance_rate,
    confidence_level,
    data_sheet_steps,
    levels_of,
    measured_steps,
    verified_level,
)
from mars_ray.scaling.service_model import Level, Mix, ServiceModel

RESULTS = Path(__file__).parent / "results"
DEPTH = 4
BATCHES = (1, 4, 16, 64, 256)
# Qwen2.5-7B, GSM8K, B = 4 (arXiv 2604.07023): threshold, T/F, accuracy; 73.2 at one token.
PAPER = ((0.95, 1.79, 71.0), (0.9, 1.96, 70.3), (0.8, 2.19, 67.7))
PAPER_ACCURACY = 73.2
# An H200 by its data sheet: 4.8 TB/s, 989 TFLOPS in bfloat16. Of either, real engines get about
# this share.
BANDWIDTH, FLOPS, SHARE = 4.8e12, 989e12, 0.7
LAUNCH_S = 1e-3  # a step's work outside the model
WEIGHTS_7B, CACHE_7B = 7.6e9, 57_344  # parameters; bytes of a token's keys and values
MEMORY_BYTES = 0.9 * 141e9
# Llama2-70B on 4 H100, medians of Splitwise's measurements (ISCA 2024, MIT,
# github.com/Mutinifni/splitwise-sim data/perf_model.csv): decoding up to 32 rows, prompts above.
STEPS_70B = (
    (1, 0.0294),
    (8, 0.0314),
    (16, 0.0328),
    (32, 0.0369),
    (128, 0.049),
    (256, 0.051),
    (512, 0.060),
    (1024, 0.105),
    (2048, 0.200),
)
# 320 GB less 140 GB of weights and a tenth; 327,680 bytes a token.
CACHE_TOKENS_70B = 450_000


def main() -> None:
    """All models, their capacities, and where the trade pays."""
    models = {
        "demo_cpu": (_demo(), Mix(48, 53)),
        "0_5b_cpu": (_half_billion(), Mix(128, 128)),
        "7b_h200": (_seven_billion(), Mix(512, 256)),
        "70b_4xh100": (_seventy_billion(), Mix(512, 256)),
    }
    result = {
        "models": {name: _capacities(model, mix) for name, (model, mix) in models.items()},
        "provenance": provenance(),
    }
    for name, (model, _) in models.items():
        model.save(RESULTS / f"service_{name}.json")
    (RESULTS / "capacity.json").write_text(json.dumps(result, indent=1) + "\n")


def _demo() -> ServiceModel:
    frontier = _read("demo")
    return ServiceModel(
        "the demo's checkpoint, 2 CPU cores, measured",
        measured_steps(_read("decode_demo")),
        levels_of(Frontier.from_json(json.dumps(frontier)), "verified", DEPTH),
        max_batch=64,
    )


def _half_billion() -> ServiceModel:
    return ServiceModel(
        "Qwen2.5-0.5B, 2 CPU cores, measured; T/F on GSM8K by acceptance",
        measured_steps(_read("decode_0_5b")),
        (verified_level(1.0, 0.0, _gsm8k_rates()),),
        max_batch=64,
    )


def _seven_billion() -> ServiceModel:
    return ServiceModel(
        "Qwen2.5-7B, H200 by its data sheet; T/F and accuracy of the paper",
        data_sheet_steps(
            2 * WEIGHTS_7B / (SHARE * BANDWIDTH), 2 * WEIGHTS_7B / (SHARE * FLOPS), LAUNCH_S
        ),
        _paper_levels(),
        max_batch=256,
        mode="confidence",
        cache_token_s=CACHE_7B / (SHARE * BANDWIDTH),
        cache_tokens=int((MEMORY_BYTES - 2 * WEIGHTS_7B) / CACHE_7B),
    )


def _seventy_billion() -> ServiceModel:
    return ServiceModel(
        "Llama2-70B on 4 H100, measured by Splitwise; T/F and accuracy as the paper's 7B",
        STEPS_70B,
        _paper_levels(),
        max_batch=64,
        mode="confidence",
        cache_tokens=CACHE_TOKENS_70B,
    )


def _paper_levels() -> tuple[Level, ...]:
    """Of the paper's rule; its lossless level is plain decoding."""
    lower = [
        confidence_level(
            threshold,
            PAPER_ACCURACY - accuracy,
            [acceptance_rate("confidence", tokens, DEPTH)] * DEPTH,
        )
        for threshold, tokens, accuracy in PAPER
    ]
    return (Level(1.0, 0.0, ()), *lower)


def _gsm8k_rates() -> list[float]:
    """By depth, from the survival that was measured on the test split."""
    metrics = _read("gsm8k")["metrics"]["mars"]
    survival = [1.0, *(metrics[f"eval_acceptance_{depth}"] for depth in range(1, DEPTH + 1))]
    return [survival[depth] / survival[depth - 1] for depth in range(1, DEPTH + 1)]


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _capacities(model: ServiceModel, mix: Mix) -> dict[str, Any]:
    levels = [Level(1.0, 0.0, ()), *(level for level in model.levels if level.shapes)]
    labels = ["exact", *(f"{model.mode} {level.threshold:g}" for level in levels[1:])]
    batches = [batch for batch in BATCHES if batch <= model.max_batch]
    return {
        "name": model.name,
        "prompt_tokens": mix.prompt_tokens,
        "output_tokens": mix.output_tokens,
        "levels": [
            {
                "label": label,
                "points_lost": level.points_lost,
                "tokens_per_s": {
                    str(batch): model.at(level, batch, mix).tokens_per_s for batch in batches
                },
            }
            for label, level in zip(labels, levels, strict=True)
        ],
    }


if __name__ == "__main__":
    main()
