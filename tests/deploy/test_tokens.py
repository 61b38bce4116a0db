"""Every cluster that a file of this repository describes asks for a token."""

import re
from pathlib import Path

import pytest
from deploy.manifests import ROOT

# Templates are checked by what they are rendered to.
FILES = [
    path
    for place in ("clusters", "deploy", "jobs")
    for path in sorted((ROOT / place).rglob("*.yaml"))
    if "templates" not in path.parts
]
# A cluster of KubeRay names its version; one that `ray up` starts, its commands.
KUBERAY = re.compile(r"^ *rayVersion:", re.MULTILINE)
STARTS = re.compile(r"\bray start ")


def described(pattern: re.Pattern[str]) -> list[Path]:
    return [path for path in FILES if pattern.search(path.read_text())]


@pytest.mark.parametrize("path", described(KUBERAY), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_kuberay_makes_asks_for_a_token(path):
    """Guards a manifest that was added without one: KubeRay's default is none."""
    assert re.search(r"authOptions:\s*(\{ *)?mode: token", path.read_text())


@pytest.mark.parametrize("path", described(STARTS), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_started_by_commands_asks_for_a_token(path):
    """Guards a cluster file whose nodes take whatever they find: `ray start` has no default."""
    assert "RAY_AUTH_MODE=token" in path.read_text()


def test_files_were_found():
    """Guards the two tests above against looking at nothing."""
    assert len(described(KUBERAY)) > 2
    assert len(described(STARTS)) == 3
