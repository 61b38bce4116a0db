"""Fixtures that several packages' tests share."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Several processes share few cores in the tests; read when a process starts its first threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without a GPU the kernels run in an interpreter; read when Triton is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """One Ray cluster of this session's own, started by the first test that asks for it; its
    dashboard is the job server."""
    import ray

    from mars_ray.cluster.environment import NODE_ENVIRONMENT

    os.environ.update(NODE_ENVIRONMENT)

    yield ray.init(address="local", num_cpus=4, include_dashboard=True, log_to_driver=True)
    ray.shutdown()
