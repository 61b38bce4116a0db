"""The cluster that a command runs on: one that is named, or its own, which is started late."""

import os
from collections.abc import Callable
from typing import Any

from mars_ray.cluster.machine import NODE_ENVIRONMENT, ask_for_token
from mars_ray.errors import ConfigError

_OWN = "local"


def named_address() -> str | None:
    address = os.environ.get("RAY_ADDRESS", _OWN)
    return None if address == _OWN else address


class Connection:
    """A context with the cluster that RAY_ADDRESS names; without one with a cluster of its own, or
    with `otherwise="auto"` with the one that runs on this machine.

    A cluster of its own takes many seconds to start, and so it starts when it is first needed:
    whatever is wrong with a job's inputs is found before.
    """

    def __init__(self, otherwise: str = _OWN, *, log_to_driver: bool = True) -> None:
        self._address = named_address() or otherwise
        self._log_to_driver = log_to_driver
        self._is_open = False

    def __enter__(self) -> "Connection":
        if self._address != _OWN:
            self.open()
        return self

    def open(self) -> None:
        """Connects, or starts the cluster, unless that was done. Raises ConfigError if none answers
        at the address."""
        if self._is_open:
            return
        for name, value in NODE_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if self._address == _OWN:
            ask_for_token()
        import ray

        try:
            ray.init(
                address=self._address, include_dashboard=None, log_to_driver=self._log_to_driver
            )
        # ValueError: RAY_ADDRESS is not an address.
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster answers at {self._address!r}: {error}. Name the one you mean with "
                "RAY_ADDRESS=HOST:PORT, and RAY_AUTH_MODE=token if it asks for a token; "
                "`mars-ray serve` says both of its own"
            ) from error
        self._is_open = True

    def __exit__(self, *_: Any) -> None:
        if self._is_open:
            import ray

            ray.shutdown()


# Called before the first use of Ray: `Connection.open`, or `already` where it is connected.
Connect = Callable[[], None]


def already() -> None:
    """Nothing: the connection is there."""
