"""What nodes have in their environment, and what more when HAProxy is asked for."""

import inspect
import subprocess
import sys
from pathlib import Path

from ray.dashboard.modules.job import job_supervisor
from ray.serve._private import constants

from mars_ray.cluster.machine import (
    HAPROXY_ENVIRONMENT,
    NODE_ENVIRONMENT,
    haproxy_environment,
)

ROOT = Path(__file__).parents[2]


def test_the_documentation_names_what_nodes_need():
    """Guards a cluster set up by the page, with limits that are not ours."""
    page = (ROOT / "docs" / "how-to" / "serve.md").read_text()
    for name, value in HAPROXY_ENVIRONMENT.items():
        assert f"\n{name}={value}\n" in page


def test_ray_knows_all_of_them():
    """Guards a setting that Ray has renamed, and so forgotten."""
    for name in haproxy_environment():
        assert hasattr(constants, name)


def test_ray_waits_for_a_stopped_job_as_it_is_told():
    """Guards a training job that is killed 3 s after `ray job stop`, without a checkpoint."""
    (name,) = (name for name in NODE_ENVIRONMENT if "JOB_STOP" in name)
    assert f'"{name}"' in inspect.getsource(job_supervisor)
    rays_own = job_supervisor.JobSupervisor.DEFAULT_RAY_JOB_STOP_WAIT_TIME_S
    assert int(NODE_ENVIRONMENT[name]) > rays_own


def test_services_of_one_machine_do_not_take_each_others_ports():
    """Guards a second one that cannot start, and ports that Linux gives to the next process."""
    first, *others = (haproxy_environment() for _ in range(20))
    names = {"RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT"}
    assert first.keys() == names | HAPROXY_ENVIRONMENT.keys()
    drawn = [{int(each[name]) for name in names} for each in (first, *others)]
    assert all(len(ports) == 2 for ports in drawn)
    assert len(set().union(*drawn)) > 20
    # Linux gives away those from 32768 on, Ray's ingresses have those from 30000 on.
    assert max(set().union(*drawn)) < 30000


def test_a_cluster_that_runs_cannot_be_told_any_more():
    """Guards an option without effect."""
    words = [sys.executable, "-m", "mars_ray", "serve", "--haproxy", str(ROOT)]
    done = subprocess.run(
        words, capture_output=True, text=True, env={"RAY_ADDRESS": "10.0.0.1:6379", "PATH": ""}
    )
    assert done.returncode == 2
    assert "10.0.0.1:6379" in done.stderr
    assert "docs/how-to/serve.md" in done.stderr
