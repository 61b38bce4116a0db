"""What a command makes of a job on a cluster of its own."""

import signal
import socket

import pytest
import ray

from mars_ray.cluster.connection import Connection, fitted, trained
from mars_ray.cluster.machine import LOOPBACK, free_port, listens
from mars_ray.config.serve import ServeJob
from mars_ray.config.train import ClusterConfig
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
        ({"cpus_per_replica": 0.9, "scaling": {"min_replicas": 2}}, 2),
        ({"cpus_per_replica": 0.6, "replicas": 3}, 3),
        ({"ingress_replicas": 10}, 1),
    ],
)
def test_no_more_replicas_are_asked_for_than_fit(settings, most):
    """Guards a policy that asks this machine for replicas for ever, and a job's own wishes."""
    assert on_two_cores(**settings).most_replicas == most


def test_each_model_has_its_own_limit():
    job = on_two_cores(more_models=[{"checkpoint": "b", "cpus_per_replica": 0.9}])
    assert [model.most_replicas for model in job.each().values()] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"replicas": 3}, r"m: its replicas need 3 x 1 CPU, and this machine has 1.9 left"),
        ({"scaling": {"min_replicas": 2}}, r"2 x 1 CPU, .* 1.9 left"),
        ({"ingress_replicas": 11}, r"m: .* 1 x 1 CPU, .* 0.9 left"),
        ({"more_models": [{"checkpoint": "b"}]}, r"b: .* 1 x 1 CPU, .* 0.9 left"),
    ],
)
def test_replicas_that_have_no_room_are_refused(settings, said):
    """Guards a service that waits for ever to be scheduled."""
    with pytest.raises(ConfigError, match=said):
        on_two_cores(**settings)


def test_a_number_of_ones_own_that_does_not_fit_is_told(capsys):
    """Guards `max_replicas=2` that is one replica, without a word."""
    on_two_cores()
    assert not capsys.readouterr().err
    assert on_two_cores(scaling={"max_replicas": 2}).most_replicas == 1
    assert "room for 1 of 2 replicas" in capsys.readouterr().err


def test_gpus_that_are_not_there_are_refused():
    """Guards a service that waits for ever to be scheduled."""
    with pytest.raises(ConfigError, match=r"gpus_per_replica=1 \(--gpus\), and this machine has 0"):
        on_two_cores(gpus_per_replica=1)


def test_no_training_guesses_where_no_worker_has_started(monkeypatch):
    """Guards workers on CPUs of a cluster that begins with its head, and would bring GPUs."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert trained(ClusterConfig()).gpus_per_worker == 0
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"memory": 8e9})
    with pytest.raises(ConfigError, match=r"no worker .* or set cluster\.gpus_per_worker"):
        trained(ClusterConfig())
    assert trained(ClusterConfig(gpus_per_worker=1)).gpus_per_worker == 1


def test_an_address_where_nothing_listens_is_told_at_once(monkeypatch):
    """Guards minutes of Ray's own attempts: the address of a service that has ended is common."""
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS.*: nothing listens there"):
        Connection().__enter__()
    with socket.create_server((LOOPBACK, 0)) as server:
        assert listens(f"127.0.0.1:{server.getsockname()[1]}")
        assert listens(f"ray://127.0.0.1:{server.getsockname()[1]}")
    assert listens("auto")


def test_ctrl_c_while_ray_connects_waits_for_the_connection(monkeypatch):
    """Guards a crash of the process, which Ray's half-made connection ends in."""
    done = []

    def init(**_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("connected")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    connection = Connection()
    # A shell has its background commands ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            connection.open()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["connected"]
    assert connection._is_open


def test_of_several_clusters_one_must_be_named(monkeypatch):
    """Guards a service that is stopped, or started, on a cluster of somebody else."""
    found = frozenset({"10.0.0.1:6379", "10.0.0.1:7000"})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: found)
    with pytest.raises(ConfigError, match=r"at 10.0.0.1:6379, 10.0.0.1:7000: name the one"):
        Connection("auto").open()
