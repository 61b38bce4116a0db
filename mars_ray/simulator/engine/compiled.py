"""Numba's compiler, with a cache that cannot become stale.

Compiling takes several seconds, so the result is kept. Numba itself checks only the file of a
function, not those of the functions that it calls; here the cache's folder is named after the
content of all of them. It lies in the user's cache, because the installation may be read-only.
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

# Type checkers do not know the true types of these.
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
    """Folder of compiled functions; None if it cannot be written: then every process compiles."""
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
