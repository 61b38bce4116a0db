"""Computes the capacity of a replica by threshold: `python benchmarks/capacity.py`.

Writes results/capacity.json: tokens per second of a replica by batch and quality level. Step costs
are measured where there are measurements, and otherwise computed (service_models.py). render.py
makes the tables of docs/autoscaling.md.
"""

import json
from pathlib import Path
from typing import Any

from service_models import measured_steps

from mars_ray.autoscale.service_model import (
    Level,
    Mix,
    ServiceModel,
    load_service_model,
    verified_level,
)
from mars_ray.provenance import provenance

RESULTS = Path(__file__).parent / "results"
MODELS = Path(__file__).parents[1] / "jobs" / "models"
DEPTH = 4
BATCHES = (1, 4, 16, 64, 128)
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
    """Write the capacities of all models."""
    paper = load_service_model(MODELS / "7b-paper.json")
    models = {
        "demo_cpu": (load_service_model(MODELS / "demo-cpu.json"), Mix(48, 53)),
        "0_5b_cpu": (_half_billion(), Mix(128, 128)),
        "7b_paper": (paper, Mix(512, 256)),
        "7b_verified": (load_service_model(MODELS / "7b-verified.json"), Mix(512, 256)),
        "70b_paper": (_seventy_billion(paper.levels), Mix(512, 256)),
    }
    result = {
        "models": {name: _capacities(model, mix) for name, (model, mix) in models.items()},
        "provenance": provenance(),
    }
    (RESULTS / "capacity.json").write_text(json.dumps(result, indent=1) + "\n")


def _half_billion() -> ServiceModel:
    return ServiceModel(
        "Qwen2.5-0.5B, 2 CPU cores, measured; T/F on GSM8K by acceptance",
        measured_steps(_read("decode_0_5b")),
        (verified_level(1.0, 0.0, _gsm8k_rates()),),
        max_batch=64,
    )


def _seventy_billion(levels: tuple[Level, ...]) -> ServiceModel:
    return ServiceModel(
        "Llama2-70B on 4 H100, measured by Splitwise; T/F and accuracy as the paper's 7B",
        STEPS_70B,
        levels,
        max_batch=64,
        mode="confidence",
        cache_tokens=CACHE_TOKENS_70B,
    )


def _gsm8k_rates() -> list[float]:
    """Acceptance rates by depth, from the survival that was measured on the test split."""
    metrics = _read("gsm8k")["metrics"]["mars"]
    survival = [1.0, *(metrics[f"eval_acceptance_{depth}"] for depth in range(1, DEPTH + 1))]
    return [survival[depth] / survival[depth - 1] for depth in range(1, DEPTH + 1)]


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _capacities(model: ServiceModel, mix: Mix) -> dict[str, Any]:
    levels = [Level(1.0, 0.0, ()), *(level for level in model.levels if level.shapes)]
    labels = ["exact", *(f"{model.mode} {level.threshold:g}" for level in levels[1:])]
    most = model.most_sequences(mix)
    batches = [batch for batch in BATCHES if batch <= most]
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
