"""One process at a time writes a directory of results."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from mars_ray.errors import ConfigError

logger = logging.getLogger(__name__)

_LOCK_FILE = ".lock"


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Raises ConfigError if another process has the directory, or if it cannot be made.

    The system lets go of it when this process ends, however it does. On shared storage processes of
    other machines are seen too, if the storage has locks; otherwise nobody is.
    """
    # Never a file in place of a lock: that would stay when this process is killed.
    lock = FileLock(directory / _LOCK_FILE, fallback_to_soft=False)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output_dir {directory} cannot be used: {error}. Mend or mount its storage, or "
            "choose another one"
        ) from error
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"another process is writing {directory}: wait until it has ended, stop it, or choose "
            "another output_dir"
        ) from None
    except (OSError, NotImplementedError) as error:
        logger.warning("%s cannot be locked, so do not run this job twice: %s", directory, error)
    try:
        yield
    finally:
        lock.release()
