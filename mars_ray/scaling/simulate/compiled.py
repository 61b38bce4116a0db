"""Numba's compiler, with its cache where there is a place for it."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compiled at its first call; the result is kept beside the source or in the user's cache.

    An installation that cannot be written to, without a home directory, compiles in every process.
    """
    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:
        return numba.njit(function)
