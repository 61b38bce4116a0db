"""Compiles the step: one library for each instruction set, by a C++ compiler alone.

`setup.py` runs this file by itself, so it imports nothing of the package.
"""

import os
import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent
SOURCE_FILES = ("step.cpp", "simd.h", "pool.h", "product.h", "attention.h", "sampling.h")
_COMMON = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
# A product is fused with a sum only where the source says so.
_EXACT = ("-ffp-contract=off", "-fno-fast-math")
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_BFLOAT16 = (*_AVX512, "-mavx512bf16")
# The compiler's flags by instruction set, the best first.
INSTRUCTION_SETS = {
    "amx": (*_BFLOAT16, "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": _BFLOAT16,
    "avx512f": _AVX512,
    "avx2": _AVX2,
}


class NoLibraryError(Exception):
    """There is no compiled step for this machine; the message says why."""


def file_name(instructions: str) -> str:
    """The name of an instruction set's library in a wheel."""
    return f"step_{instructions}.so"


def compiler() -> str | None:
    """The path of $CXX, by default of g++; None if it is not installed."""
    return shutil.which(os.environ.get("CXX", "g++"))


def compiler_flags(instructions: str) -> list[str]:
    """What the compiler is told besides the source."""
    return [*_COMMON, *_EXACT, *INSTRUCTION_SETS[instructions]]


def build(instructions: str, to: Path) -> None:
    """Compile one library: some seconds. Raises NoLibraryError."""
    path = compiler()
    if not path:
        raise NoLibraryError("there is no C++ compiler: install g++, or a wheel of mars-ray")
    # Renamed when it is whole: another process may look for it at the same time.
    part = to.with_suffix(f".{os.getpid()}")
    done = subprocess.run(
        [path, *compiler_flags(instructions), str(SOURCES / "step.cpp"), "-o", str(part)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        part.unlink(missing_ok=True)
        last = done.stderr.strip().splitlines()[-1:] or ["without a message"]
        raise NoLibraryError(f"{path} failed: {last[0]}")
    part.replace(to)
