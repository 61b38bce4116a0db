"""Training on real clusters of two and three nodes on this machine, parts of which are lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from train.small_jobs import losses, make_job, make_model, make_plan, records, run_alone

from mars_ray.config.train import TrainJob
from mars_ray.train.plan import StagePlan

STEPS = 400
PROGRAM = Path(__file__).with_name("several_nodes.py")


def job_of(model: Path, output_dir: Path, **cluster) -> TrainJob:
    job = make_job(model, output_dir).model_dump()
    job["stages"] = {"ar": job["stages"]["ar"] | {"steps": STEPS}}
    job |= {"cluster": {"threads_per_worker": 1} | cluster}
    job |= {"checkpoint": {"every_steps": 50, "keep": 1}}
    return TrainJob.model_validate(job)


def starts(plan: StagePlan) -> list[int]:
    return [record["step"] for record in records(plan, "start")]


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_nodes_and_drivers_may_be_lost(tmp_path):
    """Guards recovery, and the loss curve against where and on how many workers it was computed.

    Two nodes, of which one is killed and replaced; a driver that is killed and started again; three
    nodes, of which one is missed for a while: each curve is that of one process.
    """
    model = make_model(tmp_path / "model")
    alone = make_plan(job_of(model, tmp_path / "alone"), model, "ar")
    run_alone(alone)
    two = {"workers": 2, "placement": "strict_spread"}
    elastic = {"workers": 3, "min_workers": 2, "placement": "spread", "resize_check_s": 1}
    jobs = {
        "node": job_of(model, tmp_path / "node", **two),
        "driver": job_of(model, tmp_path / "driver", **two),
        "elastic": job_of(model, tmp_path / "elastic", **elastic),
    }
    (tmp_path / "jobs.json").write_text(
        json.dumps([job.model_dump(mode="json") for job in jobs.values()])
    )
    command = [sys.executable, str(PROGRAM), str(tmp_path / "jobs.json")]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout)
    plans = {name: make_plan(job, model, "ar") for name, job in jobs.items()}
    for name, plan in plans.items():
        assert len(losses(plan)) == STEPS, name
        assert losses(plan) == pytest.approx(losses(alone), abs=1e-4), name
    assert starts(plans["node"]) == [0, 200]
    assert len(starts(plans["driver"])) == 2
    workers = [record["workers"] for record in records(plans["elastic"], "start")]
    assert workers == [3, 2, 3]
