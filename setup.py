"""Puts the compiled step into wheels, for all instruction sets, where a C++ compiler is installed.

Without one the wheel is of Python alone, and decoding on CPUs runs in torch.
"""

import importlib.util
import platform
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_CPU = "mars_ray/decode/cpu"
_SPEC = importlib.util.spec_from_file_location("compiling", f"{_CPU}/compiling.py")
assert _SPEC
assert _SPEC.loader
compiling = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(compiling)

COMPILES = bool(sys.platform == "linux" and platform.machine() == "x86_64" and compiling.compiler())


class BuildPython(build_py):
    """Also compiles the libraries; an editable installation compiles its own when it needs one."""

    def run(self) -> None:
        """Copy the package, then compile into it."""
        super().run()
        if self.editable_mode:
            return
        if not COMPILES:
            print("no C++ compiler (or no x86-64 Linux): a wheel without the compiled step")
            return
        for name in compiling.INSTRUCTION_SETS:
            compiling.build(name, Path(self.build_lib) / _CPU / compiling.file_name(name))


class Wheel(bdist_wheel):
    """A wheel for every Python, but for one processor if it holds libraries."""

    def finalize_options(self) -> None:
        """Say whether files depend on the platform."""
        super().finalize_options()
        self.root_is_pure = not COMPILES

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-PLATFORM: the libraries do not depend on Python's version."""
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildPython, "bdist_wheel": Wheel})
