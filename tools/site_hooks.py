"""The page of the site that is written from the docstrings while mkdocs builds it."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_PACKAGE = Path(__file__).parents[1] / "mars_ray"
_API_HEAD = """# Python

Every module, written from its docstrings. Names that begin with an underscore are not for others.

"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the reference of the package."""
    files.append(File.generated(config, "reference/python.md", content=api()))
    return files


def api() -> str:
    """A page with all modules of the package."""
    names = sorted(
        ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts)
        for path in _PACKAGE.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    )
    return _API_HEAD + "\n".join(f"::: {name}\n" for name in names)
