"""Finds, builds and loads the compiled step.

There is one library for each instruction set, with a plain C interface. A wheel and the images have
them all; a checkout compiles the one that it needs, once, into the user's cache.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
_SOURCE_FILES = ("step.cpp", "simd.h", "pool.h", "product.h", "attention.h", "sampling.h")
_COMMON = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
# A product is fused with a sum only where the source says so.
_EXACT = ("-ffp-contract=off", "-fno-fast-math")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd")
_BFLOAT16 = (*_AVX512, "-mavx512bf16")
# By instruction set, the best first: the compiler's flags, and the processor's in /proc/cpuinfo.
INSTRUCTION_SETS = {
    "amx": (*_BFLOAT16, "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": _BFLOAT16,
    "avx512f": _AVX512,
    "avx2": _AVX2,
}
_FLAGS = {
    "-mavx2": "avx2",
    "-mfma": "fma",
    "-mf16c": "f16c",
    "-mavx512bf16": "avx512_bf16",
    "-mamx-tile": "amx_tile",
    "-mamx-bf16": "amx_bf16",
}


class NoLibraryError(Exception):
    """There is no compiled step for this machine; the message says why."""


@cache
def supported() -> tuple[str, ...]:
    """The instruction sets that this processor has, the best first."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    found = next((line for line in lines if line.startswith("flags")), "")
    has = set(found.partition(":")[2].split())
    return tuple(
        name
        for name, flags in INSTRUCTION_SETS.items()
        if all(_FLAGS.get(flag, flag.removeprefix("-m")) in has for flag in flags)
    )


@cache
def library(instructions: str = "auto") -> tuple[str, ctypes.CDLL]:
    """The instruction set's name and its library. Raises NoLibraryError."""
    names = supported()
    if not names:
        raise NoLibraryError("the processor has no AVX2")
    name = names[0] if instructions == "auto" else instructions
    if name not in names:
        raise NoLibraryError(f"the processor has no {name}, only {', '.join(names)}")
    built = SOURCES / file_name(name)
    loaded = ctypes.CDLL(str(built if built.exists() else _in_cache(name)))
    if name == "amx" and loaded.mars_allow_tiles():
        raise NoLibraryError("the kernel does not let this process use AMX")
    return name, loaded


def is_available(instructions: str = "auto") -> bool:
    """Whether this machine has a compiled step."""
    try:
        library(instructions)
    except NoLibraryError:
        return False
    return True


def file_name(instructions: str) -> str:
    """The name of an instruction set's library in a wheel."""
    return f"step_{instructions}.so"


def build(instructions: str, to: Path) -> None:
    """Compile one library: some seconds. Raises NoLibraryError."""
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        raise NoLibraryError(
            f"there is no compiler {compiler}: install g++, or a wheel of mars-ray"
        )
    # Renamed when it is whole: another process may look for it at the same time.
    part = to.with_suffix(f".{os.getpid()}")
    flags = [*_COMMON, *_EXACT, *INSTRUCTION_SETS[instructions]]
    done = subprocess.run(
        [compiler, *flags, str(SOURCES / "step.cpp"), "-o", str(part)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        part.unlink(missing_ok=True)
        last = done.stderr.strip().splitlines()[-1:] or ["without a message"]
        raise NoLibraryError(f"{compiler} failed: {last[0]}")
    part.replace(to)


def _in_cache(instructions: str) -> Path:
    """The library in the user's cache, compiled if the sources are new."""
    text = b"".join((SOURCES / name).read_bytes() for name in _SOURCE_FILES)
    digest = hashlib.sha256(text + repr(INSTRUCTION_SETS[instructions]).encode()).hexdigest()[:16]
    name = f"{digest}-{file_name(instructions)}"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(base) / "mars-ray"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(directory / f"{name}.lock"):
            if not (directory / name).exists():
                build(instructions, directory / name)
    except OSError as error:
        # Never a directory that others can write to: what is loaded runs with our rights.
        directory = Path(tempfile.mkdtemp(prefix="mars-ray-"))
        logger.info("the compiled step is not kept: %s", error)
        build(instructions, directory / name)
    return directory / name


def default_threads() -> int:
    """Threads of the compiled step: torch's, but not more than the container may use. One that the
    kernel stops holds up the others."""
    threads = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(threads, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or no quota ("max")
        return threads
