"""`mars-ray cluster`: a Ray cluster of several nodes on this machine, which runs until it is ended.

Each node is a `ray start --block` with processes of its own. The dashboard listens on loopback, the
nodes listen for each other on the machine's address, and all of them require a token. Started
processes are recorded in a file, and only those are ended.

    <directory>/cluster.json     the processes that run
    <directory>/node-<k>.log     output of a node's `ray start`
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated
from urllib.request import Request

import typer

from mars_ray.cluster.machine import (
    LOOPBACK,
    NODE_ENVIRONMENT,
    ask_for_token,
    check_port,
    free_port,
    urlopen,
)
from mars_ray.errors import ClusterError
from mars_ray.files import write_whole

_STATE = "cluster.json"
_START_S, _ANSWER_S = 90.0, 2.0
# A node gives its own processes the same time; a killed one is gone within moments.
_PATIENCE_S, _KILLED_S = 20.0, 10.0
# Ray ends a node that takes more than half a minute to start; on a busy machine another try helps.
_TRIES = 3
_LOOK_S = 0.1
_LOG_LINES = 15
_RAY = (sys.executable, "-m", "ray.scripts.scripts")


@dataclass(frozen=True, slots=True)
class Process:
    """A process by its number and the tick of the system's clock at which it started: numbers are
    reused, so the number alone may belong to another process by now."""

    pid: int
    started_tick: int

    @property
    def is_alive(self) -> bool:
        """Whether the number still belongs to this process, and it has not ended."""
        seen = _stat(self.pid)
        return seen is not None and seen[0] not in "ZX" and seen[1] == self.started_tick


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
        return sum(node.is_alive for node in self.nodes)


def up(plan: Plan, directory: Path) -> LocalCluster:
    """Starts a cluster and returns when it accepts jobs.

    Raises ClusterError if one runs already, a port is taken, a node does not come up, or the
    directory cannot be written; no node is left running then.
    """
    before = find(directory)
    if before is not None and before.alive:
        where = "" if directory == _DIRECTORY.expanduser() else f" --directory {directory}"
        raise ClusterError(
            f"a cluster of {before.alive} nodes runs at {before.address}; end it first with "
            f"`mars-ray cluster down{where}`"
        )
    for port in (plan.port, plan.dashboard_port):
        check_port(LOOPBACK, port, ClusterError, "--port or --dashboard-port")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(directory, error) from error
    # The token of this user's clusters, created if there is none; Ray's clients find it.
    ask_for_token()
    command = [*_RAY, "get-auth-token", "--generate"]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    token = made.stdout.strip()
    dashboard = f"http://{LOOPBACK}:{plan.dashboard_port}"
    cluster = LocalCluster(f"{LOOPBACK}:{plan.port}", dashboard, ())
    try:
        # One after the other: together they would start dozens of processes on few cores.
        while len(cluster.nodes) < plan.nodes:
            cluster = _joined(cluster, plan, directory, token)
        return cluster
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
    # Ray keeps the address of the cluster started last, and `ray.init` would wait minutes for it.
    last = _ray_directory() / "ray_current_cluster"
    port = cluster.address.rpartition(":")[2]
    if last.exists() and last.read_text().strip().endswith(f":{port}"):
        last.unlink()
    return cluster


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


def _joined(cluster: LocalCluster, plan: Plan, directory: Path, token: str) -> LocalCluster:
    """The cluster with one more node, which is up: the head once its dashboard, which accepts jobs,
    and its agent, which starts them, answer; others once the cluster counts them."""
    number, agent_port = len(cluster.nodes), free_port()
    options = _options(plan, number, agent_port)
    parts = (
        f"{cluster.dashboard}/api/gcs_healthz",
        f"http://{LOOPBACK}:{agent_port}/api/local_raylet_healthz",
    )
    for _ in range(_TRIES):
        grown = _with_node(cluster, options, directory)
        deadline = time.monotonic() + _START_S
        while grown.nodes[-1].is_alive:
            if number == 0:
                is_up = all(map(_answers, parts))
            else:
                is_up = _registered(cluster.dashboard, token) == number + 1
            if is_up:
                return grown
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"a node did not come up within {_START_S:.0f} s; see {directory}/node-*.log"
                )
            time.sleep(_LOOK_S)
    log = (directory / f"node-{number}.log").read_text(errors="replace").splitlines()
    raise ClusterError(f"node {number} ended:\n" + "\n".join(log[-_LOG_LINES:]))


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
    grown = replace(cluster, nodes=(*cluster.nodes, node))
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


def _options(plan: Plan, number: int, agent_port: int) -> list[str]:
    """Options of `ray start` for the node of this number; the first one is the head."""
    options = [
        # Ray's default is one port for all nodes of a machine.
        f"--dashboard-agent-listen-port={agent_port}",
        f"--num-cpus={plan.cpus_per_node}",
        f"--object-store-memory={plan.object_store_bytes}",
        # Any port: nodes of one machine would collide within a range.
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--disable-usage-stats",
    ]
    if number:
        # A node that fetches a job's working directory replaces an existing one. With one place for
        # all nodes, that deleted the directory of a running driver, and its next `getcwd` failed.
        place = _ray_directory() / f"{plan.port}-{number}"
        return [f"--address={LOOPBACK}:{plan.port}", f"--temp-dir={place}", *options]
    return [
        "--head",
        f"--port={plan.port}",
        f"--dashboard-host={LOOPBACK}",
        f"--dashboard-port={plan.dashboard_port}",
        f"--ray-client-server-port={free_port()}",
        *options,
    ]


def _ray_directory() -> Path:
    """The directory of Ray's sessions, found as Ray finds it."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"


def _answers(url: str) -> bool:
    try:
        with urlopen(Request(url), _ANSWER_S) as reply:
            return reply.status == 200
    except OSError:
        return False


def _registered(dashboard: str, token: str) -> int:
    """Number of nodes that the cluster itself counts as alive."""
    headers = {"Authorization": f"Bearer {token}"}
    try:
        with urlopen(
            Request(f"{dashboard}/nodes?view=summary", headers=headers), _ANSWER_S
        ) as reply:
            nodes = json.load(reply)["data"]["summary"]
    except OSError:
        return 0
    return sum(node["raylet"].get("state") == "ALIVE" for node in nodes)


def start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
    """Starts a process in a session of its own, with both outputs going to the log."""
    with log.open("wb") as output:
        # Its end is read from /proc: a later caller is not its parent.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    seen = _stat(child.pid)
    assert seen is not None, "a child is there until it is waited for"
    return Process(child.pid, seen[1])


def end(processes: Iterable[Process], patience_s: float) -> None:
    """Asks the processes to end, waits, and kills the rest, each with its process group."""
    asked = [process for process in processes if process.is_alive]
    for process in asked:
        os.kill(process.pid, signal.SIGTERM)
    _wait(asked, patience_s)
    for process in asked:
        if process.is_alive:
            os.killpg(process.pid, signal.SIGKILL)
    _wait(asked, _KILLED_S)


def _wait(processes: Sequence[Process], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while any(process.is_alive for process in processes) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start of a process, or None if there is none: proc(5), fields 3 and 22."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the name in brackets, which may hold anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


commands = typer.Typer(help="A Ray cluster of several nodes on this machine.", no_args_is_help=True)
Directory = Annotated[Path, typer.Option(help="Where its state and logs are kept.")]
_DIRECTORY = Path("~/.cache/mars-ray/cluster")


@commands.command("up")
def _up(
    nodes: Annotated[int, typer.Option(min=1, max=64)] = 3,
    cpus_per_node: Annotated[int, typer.Option(min=1, help="As Ray counts; no limit.")] = 2,
    object_store_bytes: Annotated[int, typer.Option(min=80_000_000)] = 300_000_000,
    port: Annotated[int, typer.Option(min=1024, max=65535)] = 6379,
    dashboard_port: Annotated[int, typer.Option(min=1024, max=65535)] = 8265,
    directory: Directory = _DIRECTORY,
) -> None:
    """Start it; it stays until `mars-ray cluster down`."""
    plan = Plan(nodes, cpus_per_node, object_store_bytes, port, dashboard_port)
    started = up(plan, directory.expanduser())
    typer.echo(
        f"{nodes} nodes run. `mars-ray` and `ray job submit` use them with\n"
        "    export RAY_AUTH_MODE=token "
        f"RAY_ADDRESS={started.address} RAY_API_SERVER_ADDRESS={started.dashboard}",
        err=True,
    )
    print(json.dumps({"address": started.address, "dashboard": started.dashboard, "nodes": nodes}))


@commands.command("down")
def _down(directory: Directory = _DIRECTORY) -> None:
    """End it with all that runs on it; other clusters of this machine go on."""
    print(json.dumps({"ended": len(down(directory.expanduser()).nodes)}))


@commands.command("status")
def _status(directory: Directory = _DIRECTORY) -> None:
    """Whether it runs; exit code 1 if nodes are missing."""
    found = find(directory.expanduser())
    shown = asdict(found) | {"alive": found.alive} if found else {"nodes": [], "alive": 0}
    print(json.dumps(shown))
    if found is None or found.alive < len(found.nodes):
        raise typer.Exit(1)
