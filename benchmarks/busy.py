"""`verified` over `exact` beside a busy process: `benchmarks/busy.py CHECKPOINT OUTPUT.json`.

One question at a time, in turn, on an idle machine and then while another process keeps one core
busy. Window control learns what steps cost from the steps themselves, so it must notice.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from mars_ray.adapt.speed import measure_speeds
from mars_ray.config.adapt import MeasureConfig
from mars_ray.config.decode import EngineConfig
from mars_ray.config.evaluate import PromptsTask
from mars_ray.config.inputs import FilesSource
from mars_ray.evaluate.tasks import problems_of
from mars_ray.provenance import provenance

PROMPTS = "jobs/demo-prompts.jsonl"


def main() -> None:
    """Measure alone, then beside a busy process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--adapter", type=Path, default=Path("adapters/smollm2"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--instructions", default="auto", help="such as avx2")
    asked = parser.parse_args()
    result: dict[str, Any] = {"idle": _measured(asked)}
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            result["busy"] = _measured(asked)
        finally:
            busy.kill()
    result |= {"instructions": asked.instructions, "provenance": provenance()}
    asked.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def _measured(asked: argparse.Namespace) -> dict[str, Any]:
    engine = EngineConfig(
        max_batch=1,
        max_context=512,
        dtype="bfloat16",
        device="cpu",
        threads=2,
        cpu_instructions=asked.instructions,
    )
    config = MeasureConfig(
        batch_sizes=(1,), speed_prompts=8, rounds=asked.rounds, max_new_tokens=48, engine=engine
    )
    problems = problems_of(PromptsTask(kinds={"everyday": FilesSource(paths=(PROMPTS,))}))
    (speed,) = measure_speeds(
        asked.checkpoint, asked.adapter, problems, config, Console(stderr=True), one_text=True
    )
    return asdict(speed) | {"ratios": speed.ratios}


if __name__ == "__main__":
    main()
