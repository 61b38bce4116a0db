"""The files of `jobs/` that come with the package."""

from pathlib import Path

_SHIPPED = Path(__file__).parents[1] / "jobs"


def found(path: str | Path) -> Path:
    """The path; for a `jobs/NAME` that is not there, the file of that name in the package.

    So the lines of the documentation work where there is no checkout.
    """
    path = Path(path)
    if path.parts[:1] != ("jobs",) or path.exists():
        return path
    shipped = _SHIPPED.joinpath(*path.parts[1:])
    return shipped if shipped.is_file() else path
