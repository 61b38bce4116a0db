"""Writes the service models of jobs/models/: `python benchmarks/service_models.py`.

From committed results and published figures; every model's provenance says which.
"""

import json
from pathlib import Path
from typing import Any

from mars_ray.scaling.service_model import Level, ServiceModel, Shape

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

# Qwen2.5-7B on an H200 in bfloat16: 15.2 GB of weights at 85% of 4.8 TB/s, a knee at 200 rows,
# 1 ms for launching, 57 kB of KV cache a token, 110 GB for it.
_READ_S, _KNEE_ROWS, _LAUNCH_S = 15.2e9 / (0.85 * 4.8e12), 200, 1e-3
_CACHE_BYTES, _CACHE_ROOM = 57_344, 110e9
_H200_STEPS = tuple(
    (rows, max(_READ_S, _READ_S * rows / _KNEE_ROWS) + _LAUNCH_S) for rows in (1, 200, 400, 8192)
)
_DATA_SHEET = "H200 data sheet: bandwidth at 85%, knee at 200 rows, 1 ms a step"


def demo() -> ServiceModel:
    """The demo checkpoint on one CPU core."""
    small, large = _result("decode_demo"), _result("decode_demo_large")
    cases = [c for c in small["cases"] + large["cases"] if c["label"].startswith("mars-ray ver")]
    steps = {round(_rows(case) * case["batch"]): case["ms_per_step"] / 1000 for case in cases}
    plain = _case(small, "mars-ray exact", 1)
    verified = _case(small, "mars-ray verified 1", 16)
    # Rows of prompts are in the measured ones, the same for every mode.
    prompts = plain["positions_per_token"] - 1
    rows = (verified["positions_per_token"] - prompts) * verified["tokens_per_forward"]
    frontier = _result("demo")["points"]
    exact = frontier[0]["accuracy"]
    levels = [
        Level(
            point["mode"]["threshold"],
            round(max(0.0, 100 * (exact - point["accuracy"])), 2),
            (Shape(4, round(rows, 2), round(point["tokens_per_forward"], 3)),),
        )
        for point in frontier
        if point["mode"]["type"] == "verified"
    ]
    return ServiceModel(
        "demo checkpoint, one CPU core",
        tuple(sorted({1: plain["ms_per_step"] / 1000, **steps}.items())),
        tuple(levels),
        max_batch=64,
        provenance={"from": "benchmarks/results/decode_demo*.json, demo.json"},
    )


def paper() -> ServiceModel:
    """The paper's `confidence` on GSM8K: 73.2% with one token per forward."""
    points = ((0.95, 71.0, 1.79), (0.9, 70.3, 1.96), (0.8, 67.7, 2.19))
    lower = [Level(t, round(73.2 - a, 1), (Shape(4, 5.0, f),)) for t, a, f in points]
    return ServiceModel(
        "Qwen2.5-7B, confidence, H200",
        _H200_STEPS,
        (Level(1.0, 0.0, ()), *lower),
        max_batch=128,
        mode="confidence",
        cache_token_s=_CACHE_BYTES / (0.85 * 4.8e12),
        cache_tokens=int(_CACHE_ROOM / _CACHE_BYTES),
        provenance={"levels": "arXiv 2604.07023, Qwen2.5-7B, B = 4", "steps": _DATA_SHEET},
    )


def verified() -> ServiceModel:
    """The same device with `verified`: T/F of a small model on real text.

    Nobody has measured the accuracy that a relaxed threshold costs a 7B model. Assumed is what the
    paper's rule loses at the same rise of the negative log-likelihood: 5.5 points at 8.0%.
    """
    lossless, curve = 0.448, ((0.3, 0.468, 1.61), (0.1, 0.507, 1.70), (0.03, 0.616, 1.81))
    lower = [
        Level(t, round(5.5 * (nll / lossless - 1) / 0.080, 1), (Shape(4, 9.0, f),))
        for t, nll, f in curve
    ]
    return ServiceModel(
        "7B, verified, H200",
        _H200_STEPS,
        (Level(1.0, 0.0, (Shape(4, 9.0, 1.52),)), *lower),
        max_batch=128,
        cache_token_s=_CACHE_BYTES / (0.85 * 4.8e12),
        cache_tokens=int(_CACHE_ROOM / _CACHE_BYTES),
        provenance={
            "levels": "T/F of a small model on real text; points assumed by likelihood",
            "steps": _DATA_SHEET,
        },
    )


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _case(result: dict[str, Any], label: str, batch: int) -> dict[str, Any]:
    return next(c for c in result["cases"] if c["label"] == label and c["batch"] == batch)


def _rows(case: dict[str, Any]) -> float:
    """Of a sequence in a step, with the prompts'."""
    return case["positions_per_token"] * case["tokens_per_forward"]


def main() -> None:
    """One file a model."""
    folder = ROOT / "jobs" / "models"
    folder.mkdir(exist_ok=True)
    for name, model in {"demo-cpu": demo(), "7b-paper": paper(), "7b-verified": verified()}.items():
        model.save(folder / f"{name}.json")


if __name__ == "__main__":
    main()
