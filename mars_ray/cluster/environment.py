"""The environment of all processes of a Ray cluster that runs this project, and the token with
which this user's clusters accept code."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mars_ray.cluster.port import quiet_ports

# Serve's proxies read the last two when they start. One names their middleware
# (serve/ingress/proxy.py). The other sends messages to a replica over gRPC and not as Ray objects,
# which takes less CPU for each (docs/log.md). With a token, both ways require it.
NODE_ENVIRONMENT: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A job that is told to stop writes a checkpoint first; Ray kills it after 3 s otherwise.
    "RAY_JOB_STOP_WAIT_TIME_S": "1800",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mars_ray.serve.ingress.proxy.middlewares",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}

# Further variables, if HAProxy is in front of the service instead of Serve's own proxy.
HAPROXY_ENVIRONMENT: Mapping[str, str] = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # HAProxy's limit for a client that does not finish a head or does not read; default: an hour.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "30",
    # How long an ingress that is ending still answers, so that HAProxy can notice.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
}


def haproxy_environment() -> dict[str, str]:
    """HAProxy's settings for a cluster of this machine, which may run several.

    HAProxy serves its statistics on all addresses, at ports that have to be chosen here.
    """
    names = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
    ports = map(str, quiet_ports(len(names)))
    return {**HAPROXY_ENVIRONMENT, **dict(zip(names, ports, strict=True))}


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
