"""The files of `jobs/` and `adapters/`, which come with the package."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_SHIPPED = ("jobs", "adapters")


def found(path: str | Path) -> Path:
    """The path; for a `jobs/NAME` or `adapters/NAME` that is not there, that of the package.

    So the lines of the documentation work where there is no checkout.
    """
    path = Path(path)
    if len(path.parts) < 2 or path.parts[0] not in _SHIPPED or path.exists():
        return path
    shipped = _PACKAGE / path
    return shipped if shipped.exists() else path
