"""Writing a checkpoint to where services load it from: a directory or an object store."""

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem

from mars_ray.errors import ModelError
from mars_ray.model.card import CARD_FILE
from mars_ray.model.complete import CONFIG_FILE
from mars_ray.model.object_store import WANTED, shown
from mars_ray.model.source import Source, local_copy, pinned

_CHUNK_BYTES = 16 * 1024 * 1024
# An empty file that is there until the configuration is: what lies beside it is of an export.
_UNFINISHED = "export.unfinished"
# Object stores have no directories, and would keep an empty object instead.
_WITHOUT_DIRECTORIES = ("s3", "gcs", "abfs")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    files: int
    bytes: int


def export_model(source: Source, destination: str, cache: str) -> Exported:
    """Copies the files that loading takes, and `frontier.json` if there is one.

    The configuration comes last, after the card: no service takes what has none for a model, so a
    copy that was cut short is not served, nor a trained one for want of its card as a plain one.
    One that was cut short can be made again. Raises ModelError if the checkpoint is not whole, or
    the destination holds anything else or is not writable.
    """
    directory = local_copy(pinned(source)[0], cache)
    files = sorted(
        (path for path in directory.iterdir() if path.is_file() and path.name.endswith(WANTED)),
        key=lambda path: (path.name == CONFIG_FILE, path.name == CARD_FILE, path.name),
    )
    try:
        filesystem, root = _opened(destination, {path.name for path in files})
        mark = f"{root}/{_UNFINISHED}"
        filesystem.open_output_stream(mark).close()
        for path in files:
            _copy(path, filesystem, f"{root}/{path.name}")
        # Who may not delete leaves it behind, where it means nothing beside a configuration.
        with suppress(OSError):
            filesystem.delete_file(mark)
    except (OSError, ValueError, NotImplementedError) as error:
        # Its text may have the URI with all its secrets, and so has the chain of exceptions.
        said = str(error).replace(destination, shown(destination))
        raise ModelError(f"cannot write to {shown(destination)}: {said}") from None
    return Exported(len(files), sum(path.stat().st_size for path in files))


def _opened(destination: str, names: set[str]) -> tuple[FileSystem, str]:
    """Where to write: not there yet, or empty, or with what another attempt left of these files."""
    if "://" in destination:
        filesystem, root = FileSystem.from_uri(destination)
    else:
        filesystem, root = LocalFileSystem(), str(Path(destination).expanduser().resolve())
    root = root.rstrip("/")
    is_file = filesystem.get_file_info(root).type == FileType.File
    held = set() if is_file else _held(filesystem, root)
    was_cut_short = _UNFINISHED in held and held <= names - {CONFIG_FILE} | {_UNFINISHED}
    if is_file or (held and not was_cut_short):
        raise ModelError(
            f"{shown(destination)} is there already: give every version of a model a place of its "
            "own, because services may be loading from this one"
        )
    if filesystem.type_name not in _WITHOUT_DIRECTORIES:
        filesystem.create_dir(root)
    return filesystem, root


def _held(filesystem: FileSystem, root: str) -> set[str]:
    infos = filesystem.get_file_info(FileSelector(root, allow_not_found=True))
    return {info.base_name for info in infos}


def _copy(path: Path, filesystem: FileSystem, target: str) -> None:
    with path.open("rb") as ours, filesystem.open_output_stream(target) as theirs:
        shutil.copyfileobj(ours, theirs, _CHUNK_BYTES)
    written = filesystem.get_file_info(target).size
    if written != path.stat().st_size:
        # A configuration that stays counts as there, and its place as taken.
        with suppress(OSError):
            filesystem.delete_file(target)
        raise ModelError(f"{path.name} arrived with {written} bytes; export again")
