"""How a command ends that is told to stop before it listens to signals itself."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Ray's handler of crashes prints the C++ frames of every process that gets a SIGTERM, the command's
# own among them; Python's tells of crashes only. Read when Ray is imported.
_HANDLERS = {"RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1", "PYTHONFAULTHANDLER": "1"}


@contextmanager
def sigterm_ends_at_once() -> Iterator[None]:
    """Ray turns SIGTERM into an exit with the signal's number. What has left this context is
    closed, and the rest is left to the system: Ray's libraries may crash as the interpreter ends,
    which the shell would tell of."""
    for name, value in _HANDLERS.items():
        os.environ.setdefault(name, value)
    try:
        yield
    except SystemExit as ended:
        if ended.code != signal.SIGTERM:
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + signal.SIGTERM)
