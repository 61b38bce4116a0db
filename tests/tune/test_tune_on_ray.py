"""A small sweep that loses a trial's process and its driver."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import pytest
import tomli_w
from processes import family, titled
from rich.console import Console
from train.small_jobs import make_model
from tune.sweeps import make_table

from mars_ray.config.load import load_job, parse_job
from mars_ray.config.train import TrainJob
from mars_ray.config.tune import TuneJob
from mars_ray.core.frontier import read_frontier
from mars_ray.errors import ModelError
from mars_ray.tune.results import measure
from mars_ray.tune.search import LEDGER_FILE
from mars_ray.tune.sweep import run_sweep, run_trials

pytestmark = [pytest.mark.ray, pytest.mark.long]
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tune") / "model")


def wait_for(condition: Callable[[], bool], driver: subprocess.Popen, timeout_s: float = 150):
    end = time.monotonic() + timeout_s
    while not condition():
        assert driver.poll() is None, "the driver ended by itself"
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.1)


def events(output_dir: Path, kind: str) -> list[str]:
    """The trials to which this has happened."""
    return [r["trial"] for r in _records(output_dir) if r["event"] == kind]


def came_back(output_dir: Path) -> bool:
    """Whether a trial has gone on after its process was killed."""
    records = _records(output_dir)
    failed = next((i for i, r in enumerate(records) if r["event"] == "error"), len(records))
    return any(
        r["trial"] == records[failed]["trial"] and r["event"] in ("score", "end")
        for r in records[failed + 1 :]
    )


def _records(output_dir: Path) -> list[dict[str, Any]]:
    path = output_dir / LEDGER_FILE
    lines = path.read_text().splitlines() if path.exists() else []
    # The last line may be half written.
    return [json.loads(line) for line in lines[:-1]]


def trial_processes(driver: subprocess.Popen) -> list[psutil.Process]:
    return titled(family(driver.pid), "ray::Resource")


@pytest.mark.timeout(400)
def test_a_killed_trial_is_tried_again_and_a_killed_sweep_goes_on(
    model: Path, tmp_path: Path, ray_cluster
):
    """kill -9 of a trial's process, then of the driver; then the same job to its end. Guards trials
    that are lost, begin again, or are dropped without a word."""
    output_dir = tmp_path / "sweep"
    job_file = tmp_path / "job.toml"
    # Nobody is stopped and steps are slow: the process that is killed must have something to do.
    table = make_table(model, output_dir, scheduler={"type": "none"})
    table["train"]["stages"]["mars"] |= {"global_batch_size": 64}
    job_file.write_text(tomli_w.dumps(table))
    command = [sys.executable, "-m", "mars_ray", "tune", str(job_file)]
    with (tmp_path / "driver.log").open("w") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(lambda: bool(events(output_dir, "score")), driver)
        trial_processes(driver)[0].kill()
        wait_for(lambda: came_back(output_dir), driver)
        driver.kill()
        driver.wait()
    begun = dict.fromkeys(events(output_dir, "start"))
    job = load_job(job_file)
    assert isinstance(job, TuneJob)
    sweep = run_sweep(job, QUIET)
    assert {row.status for row in sweep.rows} <= {"finished", "stopped"}
    assert len(sweep.rows) == 4
    assert set(begun) <= {row.trial for row in sweep.rows}
    assert sweep.summary["attempts_failed"] >= 1
    assert any(row.error for row in sweep.rows)
    check_files(output_dir, sweep.rows[0].trial)
    assert run_sweep(job, QUIET).rows == sweep.rows, "a finished sweep has nothing left to do"


def check_files(output_dir: Path, best: str) -> None:
    """What a sweep leaves: tables, a picture, the survivors' frontiers and a job for the best."""
    results = json.loads((output_dir / "results.json").read_text())
    table = pyarrow.parquet.read_table(output_dir / "results.parquet")
    assert table.num_rows == len(results["trials"]) == 4
    assert "optimizer.learning_rate" in table.column_names
    assert (output_dir / "pareto.png").stat().st_size > 10_000
    assert len(read_frontier(output_dir / "frontiers" / best).points) == 3
    job = load_job(output_dir / "best.toml")
    assert isinstance(job, TrainJob)
    values = results["summary"]["best"]["values"]
    assert job.stages["mars"].optimizer.learning_rate == values["optimizer.learning_rate"]


@pytest.mark.timeout(400)
def test_optuna_draws_the_points_of_a_sweep(model: Path, tmp_path: Path, ray_cluster):
    """All objectives reach it, and none of its trials is lost."""
    table = make_table(model, tmp_path / "sweep", searcher="optuna", trials=3)
    job = parse_job(table, source="test")
    assert isinstance(job, TuneJob)
    sweep = run_sweep(job, QUIET)
    assert len(sweep.rows) == 3
    assert {row.status for row in sweep.rows} <= {"finished", "stopped"}
    assert len({json.dumps(row.values) for row in sweep.rows}) == 3
    assert sweep.summary["attempts_failed"] == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("table", [{"searcher": "optuna"}, {}])
def test_a_trial_that_diverges_has_failed_and_ends_nothing(
    table: dict[str, Any], model: Path, tmp_path: Path, ray_cluster
):
    """It ends without metrics, which Tune takes for a mistake where somebody asks for them."""
    space = {"optimizer.learning_rate": {"type": "uniform", "low": 1e37, "high": 2e37}}
    job = parse_job(make_table(model, tmp_path, trials=2, space=space, **table), source="test")
    assert isinstance(job, TuneJob)
    trials = run_trials(job, QUIET).trials.values()
    assert [trial.status for trial in trials] == ["failed", "failed"]


def test_what_fails_while_it_is_measured_is_one_line(tmp_path: Path, ray_cluster):
    """Guards the coloured traceback of another process behind `mars-ray: RayTaskError`."""
    job = parse_job(make_table(tmp_path / "model", tmp_path / "sweep"), source="test")
    assert isinstance(job, TuneJob)
    with pytest.raises(ModelError) as caught:
        measure(job, [], tmp_path / "model", QUIET)
    assert type(caught.value) is ModelError
    assert "there is no directory" in str(caught.value)
    assert "Traceback" not in str(caught.value)
