"""Numba's compiler, with a cache that cannot be stale.

Compiling takes several seconds, so the result is kept. Numba itself looks only at the file of a
function, not at those of the functions that it calls; here the cache's folder is named by the
content of them all. It lies in the user's cache: the installation may be read-only.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mars_ray.errors import ConfigError

try:
    import numba
    from numba.core import config
except ModuleNotFoundError:
    raise ConfigError(
        'the simulator needs numba, which is not installed: pip install "mars-ray[simulate]"'
    ) from None

# Neither is known to type checkers as what it is.
_CONFIG: Any = config
_NJIT: Any = numba.njit
_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """The function, compiled at its first call."""
    if _FOLDER is None:
        return _NJIT(function)
    before = _CONFIG.CACHE_DIR
    _CONFIG.CACHE_DIR = str(_FOLDER)
    try:
        return _NJIT(cache=True)(function)
    finally:
        _CONFIG.CACHE_DIR = before


def _cache_folder() -> Path | None:
    """Folder of compiled functions; None where nothing can be written: every process compiles."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = root / "mars-ray" / "numba" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK) else None


_FOLDER = _cache_folder()
