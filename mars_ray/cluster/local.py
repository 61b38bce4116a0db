"""A Ray cluster of several nodes on this machine, which runs until it is ended.

Each node is a `ray start --block` with processes of its own. The dashboard listens on loopback, the
nodes listen for each other on the machine's address, and all of them require a token. Started
processes are recorded in a file, and only those are ended.

    <directory>/cluster.json     the processes that run
    <directory>/node-<k>.log     output of a node's `ray start`
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.request import Request

from mars_ray.cluster.direct import urlopen
from mars_ray.cluster.environment import NODE_ENVIRONMENT, ask_for_token
from mars_ray.cluster.port import LOOPBACK, free_port
from mars_ray.cluster.process import Process, end, start
from mars_ray.errors import ClusterError
from mars_ray.files import write_whole

_STATE = "cluster.json"
_START_S = 90.0
_TRIES = 3
_LOOK_S = 0.2
_ANSWER_S = 2.0
# A node gives its own processes the same time.
_PATIENCE_S = 20.0
_LOG_LINES = 15
_RAY = (sys.executable, "-m", "ray.scripts.scripts")


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a cluster, and where it listens."""

    nodes: int
    cpus_per_node: int
    object_store_bytes: int  # per node
    port: int
    dashboard_port: int


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A cluster that runs, or ran: the first node is the head."""

    address: str
    dashboard: str
    nodes: tuple[Process, ...]

    @property
    def alive(self) -> int:
        """Number of nodes that run."""
        return sum(node.is_alive for node in self.nodes)


def up(plan: Plan, directory: Path) -> LocalCluster:
    """Starts a cluster and returns when it accepts jobs.

    Raises ClusterError if one runs already, a port is taken, a node does not come up, or the
    directory cannot be written; no node is left running then.
    """
    before = find(directory)
    if before is not None and before.alive:
        raise ClusterError(
            f"a cluster of {before.alive} nodes runs at {before.address}; end it first with "
            "`mars-ray cluster down`"
        )
    for port in (plan.port, plan.dashboard_port):
        _check_port(port)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(directory, error) from error
    token = _token()
    cluster = LocalCluster(
        f"{LOOPBACK}:{plan.port}", f"http://{LOOPBACK}:{plan.dashboard_port}", ()
    )
    try:
        return _grown(cluster, plan, token, directory)
    except BaseException:
        if find(directory) is not None:
            down(directory)
        raise


def down(directory: Path) -> LocalCluster:
    """Ends what `up` started there, and nothing else. Raises ClusterError if there is nothing."""
    cluster = find(directory)
    if cluster is None:
        raise ClusterError(f"no cluster was started from {directory}")
    # The head last: nodes without a head log errors.
    end(cluster.nodes[1:], _PATIENCE_S)
    end(cluster.nodes[:1], _PATIENCE_S)
    (directory / _STATE).unlink()
    _forget(cluster)
    return cluster


def _forget(cluster: LocalCluster) -> None:
    """Removes the address that Ray keeps of the cluster started last: `ray.init` would use it and
    wait for minutes."""
    port = cluster.address.rpartition(":")[2]
    path = _ray_directory() / "ray_current_cluster"
    if path.exists() and path.read_text().strip().endswith(f":{port}"):
        path.unlink()


def _ray_directory() -> Path:
    """The directory of Ray's sessions, found as Ray finds it."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"


def find(directory: Path) -> LocalCluster | None:
    """The cluster started there and not ended. Raises ClusterError if the file is damaged."""
    path = directory / _STATE
    try:
        kept = json.loads(path.read_text())
        nodes = tuple(Process(**node) for node in kept.pop("nodes"))
        return LocalCluster(nodes=nodes, **kept)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClusterError(f"{path} is damaged ({error}); remove it") from error


def _grown(cluster: LocalCluster, plan: Plan, token: str, directory: Path) -> LocalCluster:
    """The cluster with all its nodes. They start one after the other, because together they would
    start dozens of processes on few cores."""
    agent_port = free_port()
    # The dashboard accepts jobs, and the agent starts them.
    parts = (
        f"{cluster.dashboard}/api/gcs_healthz",
        f"http://{LOOPBACK}:{agent_port}/api/local_raylet_healthz",
    )
    head = _head(plan, agent_port)
    cluster = _joined(cluster, head, directory, lambda _: all(map(_answers, parts)))
    while len(cluster.nodes) < plan.nodes:
        cluster = _joined(
            cluster,
            _worker(plan, cluster),
            directory,
            lambda grown: _registered(grown.dashboard, token) == len(grown.nodes),
        )
    return cluster


def _joined(
    cluster: LocalCluster,
    options: list[str],
    directory: Path,
    is_up: Callable[[LocalCluster], bool],
) -> LocalCluster:
    """The cluster with one more node, which is up. Ray ends a node that takes more than half a
    minute to start; on a busy machine another try helps."""
    for _ in range(_TRIES):
        grown = _with_node(cluster, options, directory)
        if _comes_up(grown, directory, is_up):
            return grown
    number = len(cluster.nodes)
    raise ClusterError(f"node {number} ended:\n{_end_of_log(directory, number)}")


def _with_node(cluster: LocalCluster, options: list[str], directory: Path) -> LocalCluster:
    """Starts one more node and records it."""
    environment = os.environ | NODE_ENVIRONMENT | {"RAY_AUTH_MODE": "token"}
    # A job's `python` must be the one that has this package.
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    # It would lead the new node to another cluster.
    environment.pop("RAY_ADDRESS", None)
    log = directory / f"node-{len(cluster.nodes)}.log"
    try:
        log.open("ab").close()
    except OSError as error:
        raise _unusable(directory, error) from error
    node = start([*_RAY, "start", "--block", *options], log, environment)
    grown = LocalCluster(cluster.address, cluster.dashboard, (*cluster.nodes, node))
    try:
        write_whole(directory / _STATE, json.dumps(asdict(grown), indent=1) + "\n")
    except BaseException as error:
        # The node was not recorded, so nothing else could end it.
        end((node,), _PATIENCE_S)
        if isinstance(error, OSError):
            raise _unusable(directory, error) from error
        raise
    return grown


def _unusable(directory: Path, error: OSError) -> ClusterError:
    return ClusterError(
        f"{directory} cannot be written: {error.strerror}; free space there, or choose another "
        "--directory"
    )


def _head(plan: Plan, agent_port: int) -> list[str]:
    return [
        "--head",
        f"--port={plan.port}",
        f"--dashboard-host={LOOPBACK}",
        f"--dashboard-port={plan.dashboard_port}",
        f"--dashboard-agent-listen-port={agent_port}",
        f"--ray-client-server-port={free_port()}",
        *_size(plan),
    ]


def _worker(plan: Plan, cluster: LocalCluster) -> list[str]:
    # A node that fetches a job's working directory replaces an existing one. With one place for all
    # nodes, that deleted the directory of a running driver, and its next `getcwd` failed.
    place = _ray_directory() / f"{plan.port}-{len(cluster.nodes)}"
    return [
        f"--address={cluster.address}",
        # Ray's default is one port for all nodes of a machine.
        f"--dashboard-agent-listen-port={free_port()}",
        f"--temp-dir={place}",
        *_size(plan),
    ]


def _size(plan: Plan) -> list[str]:
    return [
        f"--num-cpus={plan.cpus_per_node}",
        f"--object-store-memory={plan.object_store_bytes}",
        # Any port: nodes of one machine would collide within a range.
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--disable-usage-stats",
    ]


def _token() -> str:
    """The token of this user's clusters, created if there is none; Ray's clients find it."""
    ask_for_token()
    made = subprocess.run(
        [*_RAY, "get-auth-token", "--generate"], check=True, capture_output=True, text=True
    )
    return made.stdout.strip()


def _comes_up(
    cluster: LocalCluster, directory: Path, is_up: Callable[[LocalCluster], bool]
) -> bool:
    """Waits for `is_up`; False if the newest node has ended. Raises ClusterError after a limit."""
    deadline = time.monotonic() + _START_S
    while not is_up(cluster):
        if not cluster.nodes[-1].is_alive:
            return False
        if time.monotonic() > deadline:
            raise ClusterError(
                f"a node did not come up within {_START_S:.0f} s; see {directory}/node-*.log"
            )
        time.sleep(_LOOK_S)
    return True


def _end_of_log(directory: Path, number: int) -> str:
    text = (directory / f"node-{number}.log").read_text(errors="replace")
    return "\n".join(text.splitlines()[-_LOG_LINES:])


def _answers(url: str) -> bool:
    try:
        with urlopen(Request(url), _ANSWER_S) as reply:
            return reply.status == 200
    except OSError:
        return False


def _registered(dashboard: str, token: str) -> int:
    """Number of nodes that the cluster itself counts as alive."""
    request = Request(
        f"{dashboard}/nodes?view=summary", headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urlopen(request, _ANSWER_S) as reply:
            nodes = json.load(reply)["data"]["summary"]
    except OSError:
        return 0
    return sum(node["raylet"].get("state") == "ALIVE" for node in nodes)


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise ClusterError(
                f"cannot listen on {LOOPBACK}:{port}: {error.strerror}; set another --port or "
                "--dashboard-port"
            ) from error
