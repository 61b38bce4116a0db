"""The provenance of a result: commit, versions, hardware. And the free memory of this machine."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from mars_ray import __version__

_LIBRARIES = ("torch", "transformers", "ray", "deepspeed")


def provenance() -> dict[str, Any]:
    """Facts as JSON values. Imports nothing heavy; the GPU is named if torch is already loaded."""
    torch = sys.modules.get("torch")
    return {
        "mars_ray": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if torch and torch.cuda.is_available() else None,
    }


def _commit() -> str | None:
    """The checkout's commit, with `+` if files differ from it; None outside a checkout."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def version(name: str) -> str | None:
    """The installed version of a package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """The CPU's model name, and the matrix extensions that decide which precision is fast."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    lines = path.read_text().splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")
    flags = next((line.split(":", 1)[1].split() for line in lines if "flags" in line), [])
    extensions = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return " ".join([name or platform.machine(), *extensions])


_CGROUP = Path("/sys/fs/cgroup")


def free_on_node(cgroup: Path = _CGROUP) -> float:
    """Free bytes of this machine, or of the container that this process is in."""
    free = _numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    limit = cgroup / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        used = int((cgroup / "memory.current").read_text())
        # The kernel's file cache counts as used, but is freed when memory is needed.
        used -= _numbers(cgroup / "memory.stat")["inactive_file"]
        free = min(free, int(text) - used)
    return float(free)


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line, by the word before it."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {words[0]: int(words[1]) for words in lines}
