"""A cluster of three nodes on this machine, started and ended by the documentation's commands."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from docs.checkout import Checkout, make_checkout
from docs.commands import runs
from docs.published import publish

from mars_ray.cluster.local import LocalCluster, find
from mars_ray.cluster.machine import free_port


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the command says, and what a shell of a user has in its environment."""

    said: dict
    state: LocalCluster
    checkout: Checkout
    shared: Path  # storage that all nodes see
    export: str
    environment: dict[str, str]

    def submit(
        self, command: str, expected: int = 0, limit_s: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """A command of the documentation, to its end."""
        return self.checkout.run(f"{self.export}\n{command}", limit_s, expected)

    def ray(self, *words: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Any command of Ray's, in a checkout."""
        return subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            cwd=self.checkout.directory,
            timeout=timeout_s,
        )

    def command(self, *words: str) -> list[str]:
        """A line that begins with `ray`."""
        return [str(Path(sys.executable).parent / "ray"), *words]


@pytest.fixture(scope="package")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@contextmanager
def started(directory: Path) -> Iterator[Cluster]:
    """Three nodes below a directory, and a checkout with the documentation's data beside them."""
    port, dashboard_port = free_port(), free_port()
    places = publish(directory) | {
        "/tmp/ServeGen": f"{directory}/ServeGen",
        "127.0.0.1:6379": f"127.0.0.1:{port}",
        "http://127.0.0.1:8265": f"http://127.0.0.1:{dashboard_port}",
        "/mnt/shared": f"{directory}/mnt",
        "/shared": f"{directory}/shared",
        "s3://bucket": f"file://{directory}/bucket",
    }
    checkout = make_checkout(directory / "checkout", places)
    checkout.run("\n".join(runs("data")))
    shutil.copytree(checkout.directory / "data", directory / "shared" / "data")
    known = runs("three_nodes")
    beginnings = ("mars-ray cluster up", "export ", "mars-ray cluster down")
    up, export, down = (
        next(command for command in known if command.startswith(words)) for words in beginnings
    )
    ports = f"--port {port} --dashboard-port {dashboard_port}"
    said = json.loads(checkout.run(f"{up} {ports} --directory {directory}").stdout)
    state = find(directory)
    assert state is not None
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_API_SERVER_ADDRESS": said["dashboard"],
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    try:
        yield Cluster(said, state, checkout, directory / "shared", export, environment)
    finally:
        checkout.run(f"{down} --directory {directory}")
    assert not state.alive
