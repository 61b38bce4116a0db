"""`mars-ray cluster` apart from its nodes: what it refuses, and what it keeps."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mars_ray.cli import app
from mars_ray.cluster import local
from mars_ray.cluster.local import LocalCluster, Plan, down, find, up
from mars_ray.errors import ClusterError


def plan(port: int) -> Plan:
    return Plan(
        nodes=1, cpus_per_node=1, object_store_bytes=80_000_000, port=port, dashboard_port=1
    )


def test_a_taken_port_is_named(tmp_path):
    """Guards a head that starts beside somebody else's and is found by nobody."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=f"cannot listen on 127.0.0.1:{port}"):
            up(plan(port), tmp_path)
    assert find(tmp_path) is None


def test_how_a_running_one_is_ended_is_said_with_its_directory(tmp_path):
    """Guards advice by which another cluster would be ended, or none found."""
    state = {"address": "127.0.0.1:6379", "dashboard": "http://127.0.0.1:8265"}
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    node = {"pid": os.getpid(), "started_tick": int(fields[19])}
    (tmp_path / "cluster.json").write_text(json.dumps(state | {"nodes": [node]}))
    with pytest.raises(ClusterError, match=f"`mars-ray cluster down --directory {tmp_path}`"):
        up(plan(6379), tmp_path)


def test_nothing_to_end_is_said(tmp_path):
    """Guards a `down` in the wrong directory that looks as if it had worked."""
    with pytest.raises(ClusterError, match="no cluster was started from"):
        down(tmp_path)


@pytest.mark.parametrize(("kept", "stays"), [("192.0.2.2:6379", False), ("192.0.2.2:6380", True)])
def test_what_ended_is_not_looked_for_any_more(tmp_path, monkeypatch, kept, stays):
    """Guards an `update` that waits minutes for a cluster which is gone; another one stays."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    last = tmp_path / "ray" / "ray_current_cluster"
    last.parent.mkdir()
    last.write_text(kept)
    state = {"address": "127.0.0.1:6379", "dashboard": "http://127.0.0.1:8265", "nodes": []}
    (tmp_path / "cluster.json").write_text(json.dumps(state))
    down(tmp_path)
    assert last.exists() == stays
    assert find(tmp_path) is None


def test_a_damaged_state_is_not_guessed_at(tmp_path):
    """Guards processes that are ended because of what is left of a file."""
    (tmp_path / "cluster.json").write_text('{"address": "x"}')
    with pytest.raises(ClusterError, match="is damaged"):
        find(tmp_path)


def test_status_without_a_cluster_fails(tmp_path):
    """For scripts: the exit code tells."""
    result = CliRunner().invoke(app, ["cluster", "status", "--directory", str(tmp_path)])
    assert result.exit_code == 1
    assert json.loads(result.output)["alive"] == 0


def test_a_node_that_cannot_be_written_down_is_ended(tmp_path, monkeypatch):
    """Guards a node that no `down` knows of, and the record of those before it: the disk was full
    when their file was written anew."""
    nodes, start = [], local.start

    def started(*arguments):
        nodes.append(start(*arguments))
        return nodes[-1]

    monkeypatch.setattr(local, "start", started)
    monkeypatch.setattr(local, "_RAY", (sys.executable, "-c", "import time; time.sleep(60)"))
    one = local._with_node(LocalCluster("a:1", "http://a:2", ()), [], tmp_path)
    # Nobody writes a file in a directory's place.
    (tmp_path / ".cluster.json").mkdir()
    try:
        with pytest.raises(ClusterError, match=r"cannot be written: .*--directory"):
            local._with_node(one, [], tmp_path)
        assert [node.is_alive for node in nodes] == [True, False]
        assert find(tmp_path) == one
    finally:
        local.end(nodes, 5)


def test_a_node_asks_for_a_token_whatever_the_shell_says(tmp_path, monkeypatch):
    """Guards a cluster that runs code for whoever reaches its ports."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    asked = []

    def started(words, log, environment):
        asked.append(environment["RAY_AUTH_MODE"])
        raise OSError("enough")

    monkeypatch.setattr(local, "start", started)
    with pytest.raises(OSError, match="enough"):
        local._with_node(LocalCluster("a:1", "http://a:2", ()), [], tmp_path)
    assert asked == ["token"]


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    """Guards a traceback, where the directory is there and read-only, or full."""
    (tmp_path / "node-0.log").mkdir()
    with pytest.raises(ClusterError, match=r"cannot be written: .*--directory"):
        local._with_node(local.LocalCluster("", "", ()), [], tmp_path)


def test_a_directory_that_cannot_be_made_is_named():
    """Guards a traceback."""
    place = local.Path("/dev/null/cluster")
    free = Plan(1, 1, 80_000_000, local.free_port(), local.free_port())
    with pytest.raises(ClusterError, match=f"{place} cannot be written: .*--directory"):
        up(free, place)
