"""Rows of data sets of the Hugging Face hub."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mars_ray.config.data import HubSource
from mars_ray.errors import DataError

# <configuration>/<version>/<commit, or hash of the files>/<name>-<split>.arrow
_NAME_PARTS = 4


def rows(source: HubSource) -> Iterator[tuple[str, object]]:
    """All rows with `name:row`. Raises DataError if the data set cannot be loaded or read."""
    left = enumerate(load(source), start=1)
    while True:
        try:
            number, content = next(left)
        except StopIteration:
            return
        except OSError as error:
            # Includes Arrow's errors. Converted here, because the code that writes these rows would
            # take an OSError for a fault of its own disk.
            raise DataError(f"cannot read data set {source.name!r}: {error}") from error
        yield f"{source.name}:{number}", content


def load(source: HubSource) -> Any:
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


def fingerprint(source: HubSource) -> list[str]:
    """An identity of the downloaded data: the ends of the names under which `datasets` keeps them.

    They hold the commit of the hub's repository and a hash of the files asked for.
    """
    names = [Path(file["filename"]) for file in load(source).cache_files]
    assert names, "a data set that is not kept in memory has files"
    return ["/".join(name.parts[-_NAME_PARTS:]) for name in names]
