"""The Hugging Face hub, and the error for a name that is neither on the hub nor local.

The hub's library is imported where it is used: that takes half a second, which a command that names
a directory need not spend.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mars_ray.errors import DataError, ModelError
from mars_ray.files import RIGHTS, SPACE, remedy
from mars_ray.storage.place import Place

_PATH = "a training job leaves its models in OUTPUT_DIR/models/STAGE"


def snapshot(place: Place, patterns: Sequence[str]) -> Path:
    """The snapshot's directory in the hub's cache, named by the commit, with the files that match
    the patterns. Raises ModelError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        directory = snapshot_download(
            place.name, revision=place.revision, allow_patterns=list(patterns)
        )
    except (OSError, ValueError) as error:
        raise missing(place.name, place.revision, error) from error
    return Path(directory)


def _of_the_disk(errors: Sequence[BaseException]) -> OSError | None:
    """The error of this machine's storage among the hub's errors."""
    for error in errors:
        # Those of connections are OSErrors too.
        if isinstance(error, OSError) and (
            error.errno in SPACE or (error.filename and error.errno in RIGHTS)
        ):
            return error
    return None


def check_data_set(name: str, revision: str | None) -> None:
    """Raises DataError if the hub says that it has no such data set, or no such revision of it.
    Where it cannot be asked, its cache may have the data all the same."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if Path(name).exists():
        return
    try:
        HfApi().dataset_info(name, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise DataError(
            f"the Hugging Face hub does not give the data set {name!r}: "
            f"{_why([error]) or 'that is no name of one'}. Check name, revision and HF_TOKEN"
        ) from error
    except (OSError, ValueError):
        return


def missing(
    name: str | Path, revision: str | None = None, error: Exception | None = None
) -> ModelError:
    """The error for a name that is no local directory; `error` is the hub's, if it was asked."""
    here = name if Path(name).is_absolute() else f"{name} in {Path.cwd()}"
    errors = list(_chain(error))
    if found := _of_the_disk(errors):
        from huggingface_hub import constants

        return ModelError(
            f"what the Hugging Face hub gives of {name} cannot be kept in "
            f"{constants.HF_HUB_CACHE}: {found}. {remedy(found)}, or set HF_HOME"
        )
    why = error and _why(errors)
    if not why:
        return ModelError(f"there is no directory {here}: correct the path ({_PATH})")
    wanted = f"{name} at {revision}" if revision else name
    return ModelError(
        f"there is no directory {here}, and the Hugging Face hub does not give {wanted}: {why}. If "
        f"you mean a directory, correct the path ({_PATH}); if you mean the hub's model, check its "
        "name, the connection, HF_ENDPOINT and HF_TOKEN"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _why(errors: list[BaseException]) -> str | None:
    """The hub's message; None if it was not asked because the name cannot be a repository's."""

    from huggingface_hub import constants
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def has(*kinds: type[Exception]) -> bool:
        return any(isinstance(error, kinds) for error in errors)

    if has(HFValidationError):
        return None
    if has(RevisionNotFoundError):
        return "it has no such revision"
    if has(RepositoryNotFoundError):
        return "it has none of that name, or none that you may read"
    if has(LocalEntryNotFoundError, OfflineModeIsEnabled) and not has(HfHubHTTPError):
        if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set, and its cache has no copy"
        return f"{constants.ENDPOINT} cannot be reached from here, and its cache has no copy"
    # The other lines are about the hub's own settings.
    return str(errors[0]).strip().splitlines()[0].rstrip(".")
