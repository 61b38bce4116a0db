"""The demo of a draft adapter, on a model that is made here, as a command of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from mars_ray.cluster.machine import free_port
from mars_ray.config.demo import DemoJob
from mars_ray.config.load import load_job

ROOT = Path(__file__).parents[2]
ENGINE = {"max_batch": 4, "max_context": 128, "threads": 1}
PROMPTS = 6


@pytest.mark.ray
@pytest.mark.long
def test_from_a_plain_model_to_an_answer_twice(talker, tmp_path):
    """Everything once; then with an adapter that comes with it, which is measured and served while
    nothing is trained or measured again."""
    job = job_file(talker, tmp_path)
    first = demo(job)
    assert first["identical"] == 1
    assert first["prompts"] == PROMPTS
    assert first["http_ok"]
    assert first["tokens_per_forward"]["shipped"] is None
    assert first["tokens_per_forward"]["untrained"] >= 1
    assert set(first["speed"]) == {"1", "2"}
    assert all(speed_is_told(speed) for speed in first["speed"].values())
    run = tmp_path / "run"
    assert served_adapter(run / "trained_here") == run / "adapter"
    shutil.copytree(run / "adapter", tmp_path / "shipped")
    known = written(run)
    second = demo(job)
    assert written(run).items() >= known.items()
    trained_here = first["tokens_per_forward"]["trained_here"]
    assert second["tokens_per_forward"] == first["tokens_per_forward"] | {"shipped": trained_here}
    assert second["identical"] == 1
    assert served_adapter(run / "shipped") == tmp_path / "shipped"
    assert "Tokens per forward" in (run / "shipped" / "report.html").read_text()
    assert (run / "shipped" / "frontier.png").exists()


def test_the_job_measures_prompts_on_which_nothing_is_trained():
    """Guards a demo of what was learnt by heart: `generate` leaves out what is measured, if the
    file is where the job says; and prompts twice in it, which weigh twice."""
    job = load_job(ROOT / "jobs" / "demo.toml")
    assert isinstance(job, DemoJob)
    lines = (ROOT / job.prompts).read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert len(set(prompts)) == len(prompts) == 32
    assert job.adapt.measure.engine.dtype == "float32"
    assert (job.adapt.measure.batch_sizes, job.adapt.measure.rounds) == ((1, 8), 3)


def speed_is_told(speed: dict[str, Any]) -> bool:
    """With both rounds, or with the reason why not: a busy machine may give one."""
    return "not_measured" in speed or len(speed["verified_over_exact"]) == 2


def served_adapter(directory: Path) -> Path:
    return Path(load_job(directory / "serve.toml").engine.draft_adapter)


def written(run: Path) -> dict[str, int]:
    """When the weights, the answers and the measurements of a run came about."""
    names = ("*.safetensors", "answers.jsonl", "frontier.json", "beside.jsonl")
    return {str(path): path.stat().st_mtime_ns for name in names for path in run.rglob(name)}


def demo(job: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "mars_ray", "demo", str(job)],
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def job_file(model: Path, directory: Path) -> Path:
    prompts = directory / "prompts.jsonl"
    asked = ({"prompt": f"How many are {n} and {n + 1}?"} for n in range(PROMPTS))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in asked))
    table = {
        "kind": "demo",
        "prompts": str(prompts),
        "shipped": str(directory / "shipped"),
        "question": "How many are 2 and 3?",
        "answer_tokens": 8,
        "modes": [{"type": "verified"}, {"type": "verified", "threshold": 0.3}],
        "adapt": {
            "name": "talker",
            "model": str(model),
            "output_dir": str(directory / "run"),
            "answers": {
                "prompts": [{"type": "corpus", "count": 30}],
                "max_new_tokens": 24,
                "engine": ENGINE,
            },
            "recipe": {
                "epochs": 1.0,
                "precision": "float32",
                "max_length": 96,
                "held_out": 3,
                "workers": 1,
                "adapter": {"rank": 4, "head_size": 32, "candidates": 16},
            },
            "measure": {
                "modes": [{"type": "verified"}],
                "max_new_tokens": 16,
                "batch_sizes": [1, 2],
                "speed_prompts": 2,
                "rounds": 2,
                "engine": ENGINE | {"dtype": "float32"},
            },
            "service": {"port": free_port(), "cpus_per_replica": 0.5, "engine": ENGINE},
        },
    }
    path = directory / "demo.toml"
    path.write_text(tomli_w.dumps(table))
    return path
