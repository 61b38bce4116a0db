"""Rows of local files (JSON, JSON lines, Parquet, a prompt a line) and of the hub's data sets."""

import glob
import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import Any

from pyarrow import ArrowException

from mars_ray.config.base import found
from mars_ray.config.inputs import HubSource
from mars_ray.errors import DataError

Row = tuple[str, object]  # `file:line`, and the parsed content or the ValueError that it raised


def rows(patterns: Sequence[str]) -> Iterator[Row]:
    """All rows of all files, in order. Raises DataError if a file is missing or unreadable."""
    for path in expand(patterns):
        reader = _reader(path)
        try:
            yield from reader(path)
        # UnicodeDecodeError: a Parquet column of texts may hold arbitrary bytes.
        except (OSError, EOFError, zlib.error, UnicodeDecodeError, ArrowException) as error:
            raise DataError(f"cannot read {path}: {error}") from error


def expand(patterns: Sequence[str]) -> list[Path]:
    """The files that the paths and globs name, each once; those of one glob are sorted. A missing
    `jobs/NAME` is the package's own.

    Raises DataError for a path or glob that matches no file, one that may not be read, or one of an
    unknown kind.
    """
    named: dict[Path, None] = {}
    for pattern in patterns:
        full = str(found(expanduser(pattern)))
        try:
            # An existing name is not a glob, whatever characters it has.
            names = [full] if Path(full).exists() else sorted(glob.glob(full, recursive=True))
        except PermissionError as error:
            raise DataError(f"cannot read {pattern}: {error}") from error
        if not names:
            raise DataError(f"no such file: {pattern} (looked in {Path.cwd()})")
        for name in names:
            if Path(name).is_dir():
                raise DataError(f"{name} is a directory; name its files, as in {name}/*.jsonl")
            _reader(Path(name))
            named[Path(name)] = None
    return list(named)


def checksum(path: Path) -> str:
    """SHA-256 of a file's bytes. Raises DataError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _reader(path: Path) -> Callable[[Path], Iterator[Row]]:
    for suffix, reader in _READERS.items():
        if path.name.endswith(suffix):
            return reader
    raise DataError(f"{path} has none of the known endings {', '.join(_READERS)}")


def _lines(path: Path, parse: Callable[[bytes], object]) -> Iterator[Row]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                # An error in place of the content: one bad line does not end the file.
                try:
                    content = parse(line)
                except ValueError as error:
                    content = error
                except RecursionError:
                    content = ValueError("nested too deeply")
                yield f"{path}:{number}", content


def _json_array(path: Path) -> Iterator[Row]:
    """The elements one by one, because `json.loads` does not report the lines they start at."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
        decoder = json.JSONDecoder()
        line, done = 1, 0
        position = _behind_space(text, 0)
        if text[position : position + 1] != "[":
            raise ValueError("the file is not a list of rows; name JSON lines .jsonl")
        position = _behind_space(text, position + 1)
        while text[position : position + 1] != "]":
            line, done = line + text.count("\n", done, position), position
            content, position = decoder.raw_decode(text, position)
            yield f"{path}:{line}", content
            position = _behind_space(text, position)
            if text[position : position + 1] == ",":
                position = _behind_space(text, position + 1)
            elif text[position : position + 1] != "]":
                raise json.JSONDecodeError("expected , or ]", text, position)
        if (position := _behind_space(text, position + 1)) < len(text):
            raise json.JSONDecodeError("something follows the list", text, position)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a JSON list of rows: {error}") from error


def _behind_space(text: str, position: int) -> int:
    while text[position : position + 1] and text[position] in " \t\r\n":
        position += 1
    return position


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    number = 0
    with ParquetFile(path) as file:
        for batch in file.iter_batches():
            for content in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", content


def _prompt(line: bytes) -> object:
    return {"prompt": line.decode("utf-8-sig").strip()}


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": partial(_lines, parse=json.loads),
    ".jsonl.gz": partial(_lines, parse=json.loads),
    ".json": _json_array,
    ".json.gz": _json_array,
    ".parquet": _parquet,
    ".txt": partial(_lines, parse=_prompt),
}


def hub_rows(source: HubSource) -> Iterator[Row]:
    """All rows with `name:row`. Raises DataError if the data set cannot be loaded or read."""
    try:
        for number, content in enumerate(load_hub(source), start=1):
            yield f"{source.name}:{number}", content
    except OSError as error:
        # Includes Arrow's errors. Converted here, because the code that writes these rows would
        # take an OSError for a fault of its own disk.
        raise DataError(f"cannot read data set {source.name!r}: {error}") from error


def load_hub(source: HubSource) -> Any:
    """The `datasets.Dataset`, downloaded on first use."""
    # Imported here because it takes seconds, which jobs on files or the corpus need not spend.
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetsError

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return load_dataset(
            source.name, source.subset, split=source.split, revision=source.revision
        )
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"cannot load data set {source.name!r} (subset {source.subset}, split {source.split}): "
            f"{error}"
        ) from error


def hub_fingerprint(source: HubSource) -> list[str]:
    """An identity of the downloaded data: the ends of the names under which `datasets` keeps them.

    They hold the commit of the hub's repository and a hash of the files asked for.
    """
    names = [Path(file["filename"]) for file in load_hub(source).cache_files]
    assert names, "a data set that is not kept in memory has files"
    # <configuration>/<version>/<commit, or hash of the files>/<name>-<split>.arrow
    return ["/".join(name.parts[-4:]) for name in names]
