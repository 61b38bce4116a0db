"""What a command makes of a job on a cluster of its own."""

import pytest
import ray

from mars_ray.cluster.connection import fitted
from mars_ray.config.serve import ServeJob
from mars_ray.errors import ConfigError


def on_two_cores(**settings: object) -> ServeJob:
    return fitted(ServeJob.model_validate({"checkpoint": "m"} | settings), 0.1)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, "memory": 8e9})


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 1),
        ({"cpus_per_replica": 0.5}, 3),
        ({"cpus_per_replica": 0.1}, 4),
        ({"cpus_per_replica": 0}, 4),
        ({"scaling": {"min_replicas": 2}}, 2),
        ({"replicas": 3}, 3),
        ({"ingress_replicas": 11}, 1),
    ],
)
def test_no_more_replicas_are_asked_for_than_fit(settings, most):
    """Guards a policy that asks this machine for replicas for ever, and a job's own wishes."""
    assert on_two_cores(**settings).most_replicas == most


def test_each_model_has_its_own_limit():
    job = on_two_cores(more_models=[{"checkpoint": "b", "cpus_per_replica": 0.9}])
    assert [model.most_replicas for model in job.each().values()] == [1, 2]


def test_gpus_that_are_not_there_are_refused():
    """Guards a service that waits for ever to be scheduled."""
    with pytest.raises(ConfigError, match=r"gpus_per_replica=1 \(--gpus\), and this machine has 0"):
        on_two_cores(gpus_per_replica=1)
