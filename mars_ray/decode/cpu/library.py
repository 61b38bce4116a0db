"""Finds and loads the compiled step.

There is one library for each instruction set, with a plain C interface. A wheel and the images have
them all; a checkout compiles the one that it needs, once, into the user's cache.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from mars_ray.decode.cpu.compiling import (
    INSTRUCTION_SETS,
    SOURCE_FILES,
    SOURCES,
    NoLibraryError,
    build,
    compiler_flags,
    file_name,
)

logger = logging.getLogger(__name__)

_FLAGS = {
    "-mavx2": "avx2",
    "-mfma": "fma",
    "-mavx512bf16": "avx512_bf16",
    "-mamx-tile": "amx_tile",
    "-mamx-bf16": "amx_bf16",
}


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
    loaded = _loaded(name)
    if name == "amx" and loaded.mars_allow_tiles():
        raise NoLibraryError("the kernel does not let this process use AMX")
    return name, loaded


def _loaded(name: str) -> ctypes.CDLL:
    built = SOURCES / file_name(name)
    path = built if built.exists() else _in_cache(name)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if path == built:
            raise NoLibraryError(f"{path} cannot be loaded: {error}") from error
    # A file of the cache that is broken is made once more.
    path.unlink(missing_ok=True)
    try:
        return ctypes.CDLL(str(_in_cache(name)))
    except OSError as error:
        raise NoLibraryError(f"{path} cannot be loaded: {error}") from error


def is_available(instructions: str = "auto") -> bool:
    """Whether this machine has a compiled step."""
    try:
        library(instructions)
    except NoLibraryError:
        return False
    return True


def _in_cache(name: str) -> Path:
    """The library in the user's cache, compiled if the sources or the compiler's flags are new; if
    nothing can be kept there, in a directory of this process alone."""
    text = b"".join((SOURCES / file).read_bytes() for file in SOURCE_FILES)
    text += repr(compiler_flags(name)).encode()
    digest = hashlib.sha256(text).hexdigest()[:16]
    file = f"{digest}-{file_name(name)}"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(base) / "mars-ray"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # What is loaded runs with our rights.
        found = directory.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"others can write to {directory}")
        with FileLock(directory / f"{file}.lock"):
            if not (directory / file).exists():
                build(name, directory / file)
    except OSError as error:
        directory = Path(tempfile.mkdtemp(prefix="mars-ray-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        logger.info("the compiled step is not kept: %s", error)
        build(name, directory / file)
    return directory / file


def default_threads() -> int:
    """Threads of the compiled step: torch's, but not more than the container may use. One that the
    kernel stops holds up the others."""
    threads = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(threads, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or no quota ("max")
        return threads
