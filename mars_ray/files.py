"""Output files of a job: one writer at a time, whole files only, journals to resume from.

sole_writer           lets one process at a time write a job's output
changed_keys          tells whether existing output is of the same job
changed_in_all        does so where a job is known in several forms
claim                 keeps a directory for one job
replaced, write_whole write a file so that it exists whole or not at all
replaced_directory    does the same for a directory
clear_abandoned       removes what killed processes have left
remedy                says what to do about an error of writing
read_journal, append  JSON lines that a long run adds to and resumes from
ResultCache           keeps a long run's results by name in such a journal
"""

import errno
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mars_ray.errors import ConfigError

logger = logging.getLogger(__name__)

_ABANDONED_S = 86_400
SPACE = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
RIGHTS = errno.EACCES, errno.EPERM, errno.EROFS
_REMEDIES = {
    SPACE: "Free space",
    RIGHTS: "Let this user write there",
    (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG): "Name another place",
}


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Puts the file's name into an OSError that has none, as those of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which replaces it at the end. An earlier interruption, or a
    full disk, leaves `path` as it was. Raises OSError."""
    draft = path.with_name(f".{path.name}")
    try:
        with _named(path):
            yield draft
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it exists whole or not at all. Raises OSError."""
    with replaced(path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextmanager
def replaced_directory(directory: Path) -> Iterator[Path]:
    """A new directory that replaces `directory` when the block ends without an error; if it cannot,
    `directory` is as before. Raises OSError."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Beside its final place: a rename is atomic only within one file system.
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        fresh = work / "new"
        fresh.mkdir()
        yield fresh
        is_new = not directory.exists()
        if not is_new:
            os.replace(directory, work / "old")
        try:
            os.replace(fresh, directory)
        except OSError:
            if not is_new:
                os.replace(work / "old", directory)
            raise
    finally:
        shutil.rmtree(work)


def clear_abandoned(directory: Path, pattern: str) -> None:
    """Removes the directories that match and in which nothing was written for a day: those of
    killed processes, and of none that still writes."""
    for path in directory.glob(pattern):
        with suppress(OSError):
            written = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
            if written < time.time() - _ABANDONED_S:
                shutil.rmtree(path)


def remedy(error: Exception) -> str:
    """What to do where a file could not be written, by the system's words in the error."""
    for numbers, what in _REMEDIES.items():
        if any(os.strerror(number) in str(error) for number in numbers):
            return what
    return "Free space or mend the storage"


def check_writable(path: Path, setting: str) -> None:
    """Raises ConfigError, naming the setting, if the file cannot be written; call it before long
    work. Creates its directory."""
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; set another {setting}"
        ) from error
    if is_new:
        path.unlink()


@contextmanager
def sole_writer(place: Path, lock_file: Path, setting: str) -> Iterator[None]:
    """Holds the write lock of `place`, the file or directory that the job's `setting` names.

    Raises ConfigError if another process holds it, or if its directory cannot be made. The system
    releases it when this process ends, however it ends. On shared storage the lock also covers
    other machines if the storage supports locks; otherwise it covers nothing.
    """
    # Never a file instead of a lock: it would stay if this process is killed.
    lock = FileLock(lock_file, fallback_to_soft=False)
    try:
        lock_file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{setting} {place} cannot be used: {error}. Mend or mount its storage, or "
            f"choose another {setting}"
        ) from error
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"another process is writing {place}: wait until it has ended, stop it, or choose "
            f"another {setting}"
        ) from None
    except (OSError, NotImplementedError) as error:
        logger.warning("%s cannot be locked, so do not run this job twice: %s", place, error)
    try:
        yield
    finally:
        if lock.is_locked:
            # Deleted while held: a process that opened it before sees that it has no name any more.
            lock_file.unlink(missing_ok=True)
        lock.release()


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, sorted; any of them makes it another job."""
    return sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))


def changed_in_all(forms: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """The keys whose values differ in every form of a job, each given before and now, sorted. A
    path is the same if it is so with its directory or as it was written."""
    return sorted(set.intersection(*(set(changed_keys(*form)) for form in forms)))


def claim(path: Path, now: Mapping[str, Any], what: str, setting: str) -> None:
    """Claims the directory of `path` for a job by writing it there. Raises ConfigError if `what`
    another job has begun is in it; `setting` names the directory."""
    if path.exists():
        changed = changed_keys(json.loads(path.read_text("utf-8")), now)
        if changed:
            raise ConfigError(
                f"{path.parent} holds {what} by another job, with another {', '.join(changed)}: "
                f"choose another {setting}, or delete this one"
            )
        return
    write_whole(path, json.dumps(now, indent=1) + "\n")


def append(path: Path, *records: Any) -> None:
    """Appends records to a journal; they are on disk when this returns. Raises OSError."""
    with _named(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read_journal(path: Path, *, mend: bool = True) -> list[Any]:
    """All records that were written whole; an empty list without a file.

    An incomplete last line of a killed run is cut off, so that the next record starts a new line.
    Pass `mend=False` to only read.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if mend and len(whole) < len(content):
        # Truncates in place: rewriting could lose the file on a full disk.
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]


class ResultCache:
    """JSON values by name, each written to a journal once it is known.

    `work` identifies the work that the values result from; values of other work are ignored.
    """

    def __init__(self, path: Path | None, work: str) -> None:
        """Without a path, values are kept in memory only."""
        self._path = path
        self._work = work
        self._values: dict[str, Any] = {}
        for made_for, name, value in read_journal(path) if path else ():
            if made_for == work:
                self._values[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append(self._path, [self._work, name, value])
