"""Every cluster whose nodes a file of this repository starts asks for a token.

What KubeRay makes of the chart: test_clusters.py and test_job_manifests.py.
"""

import re

import pytest
from deploy.manifests import ROOT

STARTS = re.compile(r"\bray start ")
FILES = [
    path
    for place in ("clusters", "deploy", "jobs")
    for path in sorted((ROOT / place).rglob("*.yaml"))
    if STARTS.search(path.read_text())
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_started_by_commands_asks_for_a_token(path):
    """Guards a cluster file whose nodes take whatever they find: `ray start` has no default."""
    assert "RAY_AUTH_MODE=token" in path.read_text()


def test_files_were_found():
    """Guards the test above against looking at nothing."""
    assert {path.name for path in FILES} == {"aws.yaml", "gcp.yaml", "on-premise.yaml"}
