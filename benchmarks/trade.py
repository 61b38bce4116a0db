"""A service that grows by a replica, and lowers its threshold until that has come.

    python benchmarks/trade.py models/smollm2-mars benchmarks/results/trade.json

The same arrivals three times on Ray Serve, in `confidence` on a model that MARS has trained, of
which one replica carries less than comes in the middle: ours; with the threshold pinned at 1; with
two replicas from the start, pinned too. A replica waits at its start, as one of a large model
would. Beside the model lies a `frontier.json`, by which
the policy knows what a threshold brings and costs; that of the result is `mars-ray evaluate` on 24
questions of GSM8K's training set, 64 new tokens, `confidence` at 0.95, 0.8, 0.6, 0.4 and 0.3.
Each run is one of live_autoscale.py, which also simulates it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from mars_ray.autoscale.service_model import levels_of
from mars_ray.core.frontier import read_frontier
from mars_ray.model.directory import read_card
from mars_ray.provenance import provenance

ARMS = {
    "ours": (),
    "pinned": ("scaling.threshold.floor=1.0",),
    "two replicas": ("scaling.threshold.floor=1.0", "scaling.min_replicas=2"),
}
# One sequence a replica: on one core more rows cost as much as they bring (docs/log.md).
JOB = (
    'default_mode={type="confidence", window=2}',
    "limits.new_tokens=48",
    "engine.max_context=512",
    "scaling.quality_budget_points=20.0",
)
_SLOW_START = Path(__file__).parent / "lib" / "slow_start"


def main() -> None:
    """Run the arms, and write what each did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("output", type=Path)
    parser.add_argument("--gsm8k", default="../shared/data/gsm8k/test.jsonl")
    parser.add_argument("--rates", nargs=3, default=["0.25", "1.4", "0.25"])
    parser.add_argument("--stage-s", nargs=3, default=["20", "120", "50"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], default=[*ARMS], help="to be run")
    parser.add_argument("--ttft-s", default="4")
    parser.add_argument("--time-per-token-s", default="0.1")
    parser.add_argument("--slow-start-s", default="40", help="that a replica waits at its start")
    parser.add_argument("--floor", default="0.3")
    parser.add_argument("--directory", type=Path, default=Path("runs/trade"))
    asked = parser.parse_args()
    asked.directory.mkdir(parents=True, exist_ok=True)
    depth = read_card(Path(asked.checkpoint)).block_size
    lost = {
        level.threshold: level.points_lost
        for level in levels_of(read_frontier(asked.checkpoint), "confidence", depth)
    }
    runs = []
    for seed in asked.seeds:
        for arm, overrides in ARMS.items():
            output = asked.directory / f"{arm.replace(' ', '-')}-{seed}.json"
            if arm in asked.arms and not output.exists():
                _run(asked, seed, output, overrides)
            if not output.exists():
                continue
            runs.append({"arm": arm, "seed": seed} | _told(json.loads(output.read_text()), lost))
    result = {"points_lost": lost, "ttft_s": float(asked.ttft_s), "runs": runs}
    result["slow_start_s"] = float(asked.slow_start_s)
    result["provenance"] = provenance()
    asked.output.write_text(json.dumps(result, indent=1) + "\n")
    for run in runs:
        print(run["arm"], run["seed"], run["live"], f"{run['points_lost']:.2f} points")


def _run(asked: argparse.Namespace, seed: int, output: Path, overrides: tuple[str, ...]) -> None:
    words = [sys.executable, str(Path(__file__).parent / "live_autoscale.py")]
    words += ["--checkpoint", asked.checkpoint, "--draft-adapter", "", "--model", ""]
    words += ["--gsm8k", asked.gsm8k, "--output", str(output), "--seed", str(seed)]
    words += ["--rates", *asked.rates, "--stage-s", *asked.stage_s, "--max-batch", "1"]
    words += ["--ttft-s", asked.ttft_s, "--time-per-token-s", asked.time_per_token_s]
    slow = f'environment={{PYTHONPATH="{_SLOW_START}", SLOW_START_S="{asked.slow_start_s}"}}'
    words += ["--floor", asked.floor, "--set", *JOB, slow, *overrides]
    subprocess.run(words, check=True)


def _told(run: dict[str, Any], lost: dict[float, float]) -> dict[str, Any]:
    """What is kept of a run. Points are lost by answers as the frontier has their thresholds,
    between two of them in proportion."""
    thresholds = [row[-1] if row[-1] is not None else 1.0 for row in run["requests"]]
    points = [_between(lost, threshold) for threshold in thresholds]
    names = ("rates", "stage_s", "live", "timeline", "reasons", "cold_start_s")
    return {name: run[name] for name in names} | {
        "points_lost": sum(points) / len(points),
        "quality_recovered_s": _recovered(run["timeline"]),
    }


def _between(lost: dict[float, float], threshold: float) -> float:
    above = min(level for level in lost if level >= threshold)
    below = max((level for level in lost if level <= threshold), default=above)
    share = (above - threshold) / (above - below) if above > below else 0.0
    return lost[above] + share * (lost[below] - lost[above])


def _recovered(timeline: dict[str, Any]) -> float | None:
    """Seconds from the second replica to a threshold of 1; None without either."""
    rows = list(zip(timeline["at_s"], timeline["ready"], timeline["threshold"], strict=True))
    second = next((at for at, ready, _ in rows if ready > 1), None)
    if second is None:
        return None
    whole = (at for at, _, threshold in rows if at >= second and threshold >= 1)
    back = next(whole, None)
    return None if back is None else back - second


if __name__ == "__main__":
    main()
