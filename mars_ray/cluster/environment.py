"""What every process of a Ray cluster that runs this project has in its environment, and the token
for which this user's clusters run code."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mars_ray.cluster.port import quiet_ports

# Serve's proxies read the last two when they start: what stands in front of them
# (serve/ingress/proxy.py), and that messages go to a replica over gRPC and not as Ray's objects,
# which takes less of a CPU for each (docs/log.md). With a token, both ask for it.
NODE_ENVIRONMENT: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A job that is told to stop writes a checkpoint first; Ray kills it after 3 s otherwise.
    "RAY_JOB_STOP_WAIT_TIME_S": "1800",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mars_ray.serve.ingress.proxy.middlewares",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}

# What else it has where HAProxy stands in front of the service instead of Serve's own proxy.
HAPROXY_ENVIRONMENT: Mapping[str, str] = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # HAProxy's clock for a client that owes bytes, of a head or by not reading; an hour otherwise.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "30",
    # For so long an ingress that goes away still answers, until HAProxy has heard of it.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
}


def haproxy_environment() -> dict[str, str]:
    """HAProxy's settings for a cluster of this machine, which may run several.

    HAProxy tells its statistics on all addresses, at ports that somebody has to choose.
    """
    names = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
    ports = map(str, quiet_ports(len(names)))
    return {**HAPROXY_ENVIRONMENT, **dict(zip(names, ports, strict=True))}


def keep_private() -> None:
    """Makes the file of Ray's token readable for its owner only, before Ray writes into it.

    Ray makes it readable for everybody, and takes an empty one for none.
    """
    path = Path.home() / ".ray" / "auth_token"
    # Where nothing can be written, or the file is mounted, the token comes from elsewhere.
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        path.touch(mode=0o600)
        path.chmod(0o600)
