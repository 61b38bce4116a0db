"""The documentation as a site."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import reference_pages
import yaml

from mars_ray.config.load import JOB_KINDS
from mars_ray.simulator.config import KINDS

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_it_builds_without_a_warning(tmp_path):
    """Guards links to headings that were renamed, and docstrings that cannot be read."""
    environment = os.environ | {"PYTHONPATH": "tools", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / "reference" / "python.html").read_text()
    assert "mars_ray.decode.engine" in api
    assert "ServeJob" in (tmp_path / "reference" / "configuration.html").read_text()


def test_every_page_can_be_found():
    """Guards a page that no menu names."""
    settings = (ROOT / "mkdocs.yml").read_text()
    named = set(flat(yaml.safe_load(settings)["nav"]))
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    assert pages - {"log.md"} <= named


@pytest.mark.parametrize("name", ["commands.md", "configuration.md"])
def test_references_are_those_of_the_code(name):
    """Guards a command's option or a job's field that came after its page: make generate."""
    assert (reference_pages.PLACE / name).read_text() == reference_pages.pages()[name]


def flat(nav) -> list[str]:
    """Paths of a menu of menus."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [path for part in parts for path in flat(part)]


def test_the_reference_has_every_field():
    """Guards a job's field that the reference leaves out."""
    text = reference_pages.configuration()
    for kind, model in (JOB_KINDS | KINDS).items():
        assert f"`kind = '{kind}'`" in text
        for name in model.model_fields:
            assert name == "kind" or f"| `{name}` |" in text
    assert "| `learning_rate` | number, > 0 | required |" in text
