"""A fresh checkout to try the documentation's commands in, as its reader does."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from docs.commands import runs

ROOT = Path(__file__).parents[2]
# What `git clone` brings and commands read; .gitignore says what a submitted job leaves at home.
_BROUGHT = ("mars_ray", "jobs", "adapters", "benchmarks", "tools", "Makefile")
_BROUGHT += ("pyproject.toml", "constraints.txt")
_STAMPS = (".run", ".dev")


@dataclass(frozen=True, slots=True)
class Checkout:
    """A directory that looks like a checkout after `make setup`.

    `places` are put where the documentation names a place that is not here: an address, storage
    that nodes share, a port.
    """

    directory: Path
    places: dict[str, str] = field(default_factory=dict)

    def run(
        self, command: str, timeout_s: float = 240, expected: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """To its end, with the exit code that is expected."""
        done = subprocess.run(
            shell(self._placed(command)),
            cwd=self.directory,
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        said = f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        assert done.returncode == expected, said
        return done

    def start(self, command: str, log: Path) -> subprocess.Popen[str]:
        """What stays until it is ended, with all that it says in a file."""
        with log.open("w") as file:
            return subprocess.Popen(
                shell(self._placed(command)),
                cwd=self.directory,
                env=_environment(),
                stdout=file,
                stderr=file,
                text=True,
            )

    def _placed(self, command: str) -> str:
        for place, ours in self.places.items():
            command = command.replace(place, ours)
        return command


def shell(command: str) -> list[str]:
    """One that ends at the first thing that fails, in a checkout's own environment."""
    (activate,) = runs("shell")
    return ["bash", "-ec", f"set -o pipefail; {activate}\n{command}"]


def make_checkout(directory: Path, places: dict[str, str] | None = None) -> Checkout:
    """With this environment as its own, installed already."""
    directory.mkdir(parents=True)
    for name in _BROUGHT:
        (directory / name).symlink_to(ROOT / name)
    # Ray does not read a link to it.
    shutil.copy(ROOT / ".gitignore", directory)
    add_environment(directory)
    return Checkout(directory, places or {})


def add_environment(directory: Path) -> None:
    """This one, as if `make setup` had just made it there."""
    (directory / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name not in _STAMPS:
            (directory / ".venv" / path.name).symlink_to(path)
    for name in _STAMPS:
        (directory / ".venv" / name).touch()


def _environment() -> dict[str, str]:
    """Without what the test's own environment has on its path."""
    ours = str(Path(sys.executable).parent)
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if p != ours)
    # Where the package is installed from another checkout, this one counts.
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
