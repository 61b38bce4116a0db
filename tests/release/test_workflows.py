"""What happens on a push and on a commit: commands that are there, with few rights."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_workflows_are_what_github_takes():
    """Guards keys that GitHub refuses only after the push."""
    check = [Path(sys.executable).parent / "check-jsonschema"]
    schema = ["--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run(
        [*check, *schema, *WORKFLOWS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_developers_run(path):
    """Guards make targets that were renamed, and rights that nobody asked for."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    made = [
        target
        for step in steps
        for line in re.findall(r"^make ([a-z -]+)$", step.get("run", ""), re.MULTILINE)
        for target in line.split()
    ]
    assert made
    assert set(made) <= TARGETS
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_together_they_lint_test_build_and_document():
    """Guards a check that is not run anywhere any more."""
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    for target in ("check", "test", "docs", "wheel", "licences", "sbom"):
        assert re.search(rf"make .*\b{target}\b", text), target
    assert "file: deploy/Dockerfile" in text


def test_hooks_use_the_tools_of_this_environment():
    """Guards hooks that check with other versions than the continuous integration."""
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in settings["repos"] for hook in repository["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}
    for hook in hooks:
        for tool in re.findall(r"\.venv/bin/(\w+)", hook["entry"]):
            assert (Path(sys.executable).parent / tool).exists(), tool
        for script in re.findall(r"tools/\w+\.py", hook["entry"]):
            assert (ROOT / script).exists()
