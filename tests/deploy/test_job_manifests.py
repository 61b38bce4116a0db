"""The submissions of jobs/README.md and the RayJobs: one table, every job file, good commands."""

import shlex

import pytest
import yaml
from deploy.manifests import ROOT, check, check_groups, cluster_of, groups
from job_manifests import OTHERS, SUBMISSIONS, Submission, files, ray_job
from typer.testing import CliRunner

from mars_ray.cli import app
from mars_ray.config.load import JOB_KINDS, load_job
from mars_ray.config.train import TrainJob
from mars_ray.simulator.config import KINDS

by_job = pytest.mark.parametrize("submission", SUBMISSIONS, ids=lambda entry: entry.job)


def test_what_is_written_is_up_to_date():
    """Guards manifests edited by hand, and tables that moved on without them."""
    stale = [path.name for path, text in files().items() if path.read_text() != text]
    assert not stale, "run python tools/job_manifests.py"
    kept = {path.name for path in (ROOT / "jobs" / "kuberay").glob("*.yaml")}
    assert kept == {f"{entry.name}.yaml" for entry in SUBMISSIONS}


def test_every_job_file_is_there():
    """Guards a new job file that nobody says how to submit."""
    assert {entry.job for entry in SUBMISSIONS} | set(OTHERS) == {
        path.stem for path in (ROOT / "jobs").glob("*.toml")
    }


@by_job
def test_commands_are_understood(submission: Submission, monkeypatch):
    """Guards an override of a field that was renamed: on a cluster it costs ten minutes to see."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(submission.entrypoint)
    assert words[:3] == ["python", "-m", "mars_ray"]
    done = CliRunner().invoke(app, [*words[3:], "--dry-run"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "/shared/" in done.output or "--output /shared/" in submission.entrypoint


@by_job
def test_ray_jobs_are_valid(submission: Submission):
    """Guards keys that the API server drops, and clusters that outlive their job."""
    manifest = ray_job(submission)
    check(manifest)
    spec = manifest["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert len(manifest["metadata"]["name"]) <= 47
    assert cluster_of(manifest)["authOptions"] == {"mode": "token"}
    check_groups(groups(manifest))
    with pytest.raises(AssertionError, match="backoffLimits"):
        check(manifest | {"spec": spec | {"backoffLimits": 1}})


@by_job
def test_the_cluster_has_room(submission: Submission):
    """Guards a job that waits for ever for workers which no node of its cluster can hold."""
    manifest = yaml.safe_load((ROOT / "jobs" / "kuberay" / f"{submission.name}.yaml").read_text())
    _, workers = groups(manifest)
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
