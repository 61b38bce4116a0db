"""A cluster of three nodes on this machine, started and ended by the command."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from serve.real_port import free_port

from mars_ray.cluster.local import LocalCluster, find

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the command says, and what a shell of a user has in its environment."""

    said: dict
    state: LocalCluster
    directory: Path
    environment: dict[str, str]

    def ray(self, *words: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """A command of Ray's, in a checkout."""
        return subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            cwd=self.directory / "checkout",
            timeout=timeout_s,
        )

    def command(self, *words: str) -> list[str]:
        """A line that begins with `ray`."""
        return [str(Path(sys.executable).parent / "ray"), *words]


@pytest.fixture(scope="package")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    port, dashboard_port = free_port(), free_port()
    ports = ["--port", str(port), "--dashboard-port", str(dashboard_port)]
    up = mars_ray("cluster", "up", "--nodes", "3", *ports, "--directory", str(directory))
    assert up.returncode == 0, up.stderr
    state = find(directory)
    assert state is not None
    said = json.loads(up.stdout)
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_API_SERVER_ADDRESS": said["dashboard"],
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    _make_checkout(directory / "checkout")
    yield Cluster(said, state, directory, environment)
    down = mars_ray("cluster", "down", "--directory", str(directory))
    assert down.returncode == 0, down.stderr
    assert not state.alive


def mars_ray(*words: str) -> subprocess.CompletedProcess[str]:
    """The command, as a user starts it."""
    return subprocess.run(
        [sys.executable, "-m", "mars_ray", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def _make_checkout(directory: Path) -> None:
    """What a checkout holds, without environments and runs."""
    directory.mkdir()
    for name in ("mars_ray", "jobs"):
        (directory / name).symlink_to(ROOT / name)
