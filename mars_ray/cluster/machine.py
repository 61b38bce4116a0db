"""What processes of a cluster have in common on a machine: the environment of its nodes, the token
with which this user's clusters accept code, ports, requests without a proxy, and how a command ends
that is told to before it listens to signals itself."""

import os
import random
import signal
import socket
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mars_ray.errors import ConfigError, MarsError

# Serve reads the last three when its processes start. The first names its proxies' middleware
# (serve/ingress/proxy.py). The second sends messages to a replica over gRPC and not as Ray objects,
# which takes less CPU for each (docs/log.md). With a token, both ways require it.
NODE_ENVIRONMENT: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A job that is told to stop writes a checkpoint first; Ray kills it after 3 s otherwise.
    "RAY_JOB_STOP_WAIT_TIME_S": "1800",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mars_ray.serve.ingress.proxy.middlewares",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # A whole reply of a replica may be so large; 4 MiB otherwise, less than many log-probabilities.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "1073741824",
}

# Further variables, if HAProxy is in front of the service instead of Serve's own proxy.
HAPROXY_ENVIRONMENT: Mapping[str, str] = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # HAProxy's limit for a client that does not finish a head or does not read; default: an hour.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "30",
    # How long an ingress that is ending still answers, so that HAProxy can notice.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
}
# Ray's handler of crashes prints the C++ frames of every process that gets a SIGTERM, the command's
# own among them; Python's tells of crashes only. Read when Ray is imported.
_HANDLERS = {"RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1", "PYTHONFAULTHANDLER": "1"}
LOOPBACK = "127.0.0.1"
_LISTENS_S = 5.0
# Below the ports that Linux and Ray assign by themselves, which the next process may get.
_QUIET = range(20000, 30000)
_HERE = ("127.0.0.1", "::1", "localhost")
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def haproxy_environment() -> dict[str, str]:
    """HAProxy's settings for a cluster of this machine, which may run several.

    HAProxy serves its statistics on all addresses, at ports that have to be chosen here.
    """
    names = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
    ports = map(str, quiet_ports(len(names)))
    return {**HAPROXY_ENVIRONMENT, **dict(zip(names, ports, strict=True))}


def end_haproxy(node: str) -> None:
    """Ends the HAProxies that are left of a node, given by Ray's id: Serve may end the actor that
    is just replacing one, and the new one would hold the service's port."""
    place = f"/haproxy-serve/{node}/".encode()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        # Others come and go.
        with suppress(OSError):
            if place in file.read_bytes():
                os.kill(int(file.parent.name), signal.SIGKILL)


def ask_for_token() -> None:
    """Has a cluster that this process starts ask for a token, unless the environment says no.

    Creates the token's file, readable for its owner only, before Ray writes into it: Ray itself
    would make it readable for everybody. It treats an empty file as no token.
    """
    # Not every release of Ray does so by itself. Its library reads the variable once, when it is
    # imported; setting it later would have processes of one cluster disagree.
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    path = Path.home() / ".ray" / "auth_token"
    # If the file cannot be written or is mounted, the token comes from elsewhere.
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        path.touch(mode=0o600)
        path.chmod(0o600)


def free_port() -> int:
    """A port on which no process listens at the moment, and that the system does not assign by
    itself before its taker listens there."""
    return quiet_ports(1)[0]


def quiet_ports(count: int) -> list[int]:
    """Ports that are free on all addresses, and that the system does not assign by itself."""
    found: list[int] = []
    # Not from a seed, which several processes may share.
    for port in random.SystemRandom().sample(_QUIET, len(_QUIET)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            break
    return found


def listens(address: str) -> bool:
    """Whether a process listens at HOST:PORT, or at a URI with both; what has no port may be."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        if not parts.hostname or not parts.port:
            return True
        socket.create_connection((parts.hostname, parts.port), _LISTENS_S).close()
    except ValueError:
        return True  # not an address: Ray says so
    except OSError:
        return False
    return True


def check_port(
    host: str,
    port: int,
    error: type[MarsError] = ConfigError,
    options: str = "host= or port=",
) -> None:
    """Raises ConfigError, or the error of a command with other options, if another process listens
    there.

    Serve's proxy allows port sharing, and would then get only half of the requests.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do, so that a port whose last connections are still closing counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as taken:
            raise error(
                f"cannot listen on {host}:{port}: {taken.strerror}; set another {options}"
            ) from taken


def urlopen(request: urllib.request.Request, timeout_s: float) -> Any:
    """Opens a request as urllib does, which would send even one for loopback to `http_proxy`.

    Raises OSError, and ValueError for an invalid address.
    """
    if urlsplit(request.full_url).hostname in _HERE:
        return open_direct(request, timeout_s)
    return urllib.request.urlopen(request, timeout=timeout_s)


def open_direct(request: urllib.request.Request, timeout_s: float) -> Any:
    """Opens a request as urllib does, but never through a proxy.

    Raises OSError, and ValueError for an invalid address.
    """
    return _direct.open(request, timeout=timeout_s)


@contextmanager
def sigterm_ends_at_once() -> Iterator[None]:
    """Ray turns SIGTERM into an exit with the signal's number, or, while it waits itself, into
    one with 1 and a message that has the number. What has left this context is closed, and the
    rest is left to the system: Ray's libraries may crash as the interpreter ends, which the shell
    would tell of."""
    for name, value in _HANDLERS.items():
        os.environ.setdefault(name, value)
    try:
        yield
    except SystemExit as ended:
        said = getattr(ended, "ray_terminate_msg", "")
        if ended.code != signal.SIGTERM and f"Exit code: {signal.SIGTERM:d}." not in said:
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + signal.SIGTERM)
