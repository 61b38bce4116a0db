"""The one message for a model that is neither a directory here nor given by the hub."""

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from mars_ray.errors import ModelError

_PATH = "a training job leaves its models in OUTPUT_DIR/models/STAGE"


def missing(
    name: str | Path, revision: str | None = None, error: Exception | None = None
) -> ModelError:
    """Of a name that is no directory here; `error` is what came of asking the hub, if it was."""
    here = name if Path(name).is_absolute() else f"{name} in {Path.cwd()}"
    why = error and _why(list(_chain(error)))
    if not why:
        return ModelError(f"there is no directory {here}: correct the path ({_PATH})")
    wanted = f"{name} at {revision}" if revision else name
    return ModelError(
        f"there is no directory {here}, and the Hugging Face hub does not give {wanted}: {why}. If "
        f"you mean a directory, correct the path ({_PATH}); if you mean the hub's model, check its "
        "name, the connection, HF_ENDPOINT and HF_TOKEN"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _why(errors: list[BaseException]) -> str | None:
    """None if the hub was not asked, because the name cannot be one of its."""

    def has(*kinds: type[Exception]) -> bool:
        return any(isinstance(error, kinds) for error in errors)

    if has(HFValidationError):
        return None
    if has(RevisionNotFoundError):
        return "it has no such revision"
    if has(RepositoryNotFoundError):
        return "it has no such model, or none that you may read"
    if has(LocalEntryNotFoundError, OfflineModeIsEnabled) and not has(HfHubHTTPError):
        if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set, and its cache has no copy"
        return f"{constants.ENDPOINT} cannot be reached from here, and its cache has no copy"
    # The rest of what it says is about its own settings.
    return str(errors[0]).strip().splitlines()[0].rstrip(".")
