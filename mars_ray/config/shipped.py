"""The files of `jobs/` and `adapters/` that come with the package."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_SHIPPED = ("jobs", "adapters")


def found(path: str | Path) -> Path:
    """The path, or for a missing `jobs/NAME` or `adapters/NAME` the package's own copy.

    This makes the commands of the documentation work without a checkout.
    """
    path = Path(path)
    if len(path.parts) < 2 or path.parts[0] not in _SHIPPED or path.exists():
        return path
    shipped = _PACKAGE / path
    return shipped if shipped.exists() else path
