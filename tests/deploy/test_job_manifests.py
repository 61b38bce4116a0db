"""The submissions of jobs/README.md and the chart's RayJobs: one table, good commands."""

import json
import shlex

import pytest
from deploy.manifests import (
    ROOT,
    check,
    check_groups,
    cluster_of,
    example,
    groups,
    merged,
    of_kind,
    rendered,
)
from job_manifests import OTHERS, SUBMISSIONS, Submission, files

from mars_ray.config.load import JOB_KINDS, load_job
from mars_ray.config.train import TrainJob
from mars_ray.simulator.config import KINDS

by_job = pytest.mark.parametrize("submission", SUBMISSIONS, ids=lambda entry: entry.job)


def test_what_is_written_is_up_to_date():
    """Guards files edited by hand, and tables that moved on without them."""
    stale = [path.name for path, text in files().items() if path.read_text() != text]
    assert not stale, "run python tools/job_manifests.py"


def ray_job(submission: Submission) -> dict:
    """As `helm install NAME deploy/chart --values ... --set kind=RayJob,job.name=...` makes it."""
    values = merged(example(f"machines-{submission.pool}"), {"kind": "RayJob"})
    name = submission.job.replace(".", "-")
    (job,) = of_kind(rendered(merged(values, {"job": {"name": submission.job}}), name), "RayJob")
    return job


def test_every_job_file_is_there():
    """Guards a new job file that nobody says how to submit."""
    assert {entry.job for entry in SUBMISSIONS} | set(OTHERS) == {
        path.stem for path in (ROOT / "jobs").glob("*.toml")
    }


@by_job
def test_commands_are_understood(submission: Submission, monkeypatch, resolved):
    """Guards an override of a field that was renamed: on a cluster it costs ten minutes to see."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(submission.entrypoint)
    assert words[:3] == ["python", "-m", "mars_ray"]
    job = json.dumps(resolved(words[3:]))
    assert "/shared/" in job or "--output /shared/" in submission.entrypoint


@by_job
def test_ray_jobs_are_valid(submission: Submission):
    """Guards keys that the API server drops, and clusters that outlive their job."""
    manifest = ray_job(submission)
    check(manifest)
    spec = manifest["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["entrypoint"] == submission.entrypoint.strip()
    assert spec.get("entrypointNumCpus", 0) == submission.cpus
    assert spec.get("entrypointNumGpus", 0) == submission.gpus
    assert spec["activeDeadlineSeconds"] == submission.hours * 3600
    assert cluster_of(manifest)["authOptions"] == {"mode": "token"}
    check_groups(groups(manifest))
    with pytest.raises(AssertionError, match="backoffLimits"):
        check(manifest | {"spec": spec | {"backoffLimits": 1}})


@by_job
def test_the_cluster_has_room(submission: Submission):
    """Guards a job that waits for ever for workers which no node of its cluster can hold."""
    _, workers = groups(ray_job(submission))
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    cpus, gpus = float(limits["cpu"]), float(limits.get("nvidia.com/gpu", 0))
    assert submission.cpus <= cpus
    assert submission.gpus <= gpus
    job = load_job(ROOT / "jobs" / f"{submission.job}.toml", kinds=JOB_KINDS | KINDS)
    if isinstance(job, TrainJob):
        wanted = job.cluster
        per_node = cpus // wanted.cpus_per_worker
        if wanted.gpus_per_worker:
            per_node = min(per_node, gpus // wanted.gpus_per_worker)
        assert wanted.workers <= per_node * workers["maxReplicas"]
