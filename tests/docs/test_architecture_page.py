"""Every function, class and file that docs/inside/architecture.md names is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "inside" / "architecture.md").read_text()


def defined(path: Path) -> set[str]:
    """Functions and classes of a file, methods behind the name of their class."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            own = [each for each in node.body if hasattr(each, "name")]
            names |= {node.name, *(f"{node.name}.{each.name}" for each in own)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names


def test_every_function_that_is_named_is_there():
    """Guards call lists of code that was moved."""
    named = re.findall(r"`([\w/]+\.py):\s+([\w.]+)`", PAGE)
    assert len(named) > 30
    for path, name in named:
        assert name in defined(ROOT / "mars_ray" / path), f"{path}: {name}"


def test_every_file_that_is_named_is_there():
    for path in re.findall(r"`([\w/]+\.py)[:`]", PAGE):
        assert (ROOT / "mars_ray" / path).exists() or (ROOT / path).exists(), path


def test_it_stays_short():
    assert len(PAGE.split()) <= 1200
