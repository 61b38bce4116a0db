"""Fixtures that several packages' tests share."""

import os
from collections.abc import Iterator

import pytest

# Several processes share few cores in the tests; read when a process starts its first threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray cluster of this session's own, started by the first test that asks for it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=True)
    yield
    ray.shutdown()
