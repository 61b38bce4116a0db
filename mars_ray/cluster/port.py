"""Ports of this machine."""

import random
import socket
from contextlib import suppress

from mars_ray.errors import ConfigError

LOOPBACK = "127.0.0.1"
# Below the ports that Linux and Ray assign by themselves, which the next process may get.
_QUIET = range(20000, 30000)


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


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if another process listens there.

    Serve's proxy allows port sharing, and would then get only half of the requests.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do, so that a port whose last connections are still closing counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; set another host= or port="
            ) from error
