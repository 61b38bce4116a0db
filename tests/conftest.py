"""Fixtures that several packages' tests share."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

# Several processes share few cores in the tests; read when a process starts its first threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray would let its workers wait for whatever else computes, other tests among it.
os.environ.setdefault("RAY_worker_niceness", "0")
# Without a GPU the kernels run in an interpreter; read when Triton is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests begin first, so that processes that share the files end at about the
    same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], dict[str, Any]]:
    """The job that a command's dry run prints. Its inputs may be missing here, which comes after
    the job; the hub and object stores are not asked for theirs."""
    from typer.testing import CliRunner

    from mars_ray import inputs
    from mars_ray.cli import app
    from mars_ray.errors import MarsError

    monkeypatch.setattr(inputs, "_check_elsewhere", lambda _: None)

    def job(words: Sequence[str]) -> dict[str, Any]:
        done = CliRunner().invoke(app, [*words, "--dry-run"])
        if not done.stdout:
            raise done.exception or AssertionError(done.output)
        assert done.exception is None or isinstance(done.exception, MarsError), done.exception
        return json.loads(done.stdout)

    return job


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One Ray cluster of this process's own, started by the first test that asks for it; its
    dashboard is the job server."""
    import ray

    from mars_ray.cluster.machine import NODE_ENVIRONMENT

    os.environ.update(NODE_ENVIRONMENT)
    os.environ.setdefault("RAY_metrics_report_interval_ms", "2000")
    # The user's token is made by the first cluster, and read by all.
    with FileLock(tmp_path_factory.getbasetemp().parent / "ray_cluster.lock"):
        context = ray.init(address="local", num_cpus=4, include_dashboard=True, log_to_driver=True)
    yield context
    ray.shutdown()
