"""The official Node client; installed once, into `.cache/`."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from serve.asking import ask, text_of

HERE = Path(__file__).parent / "node"
INSTALLED = Path(__file__).parents[2] / ".cache" / "node-client"


@pytest.fixture(scope="module")
def node() -> Path:
    """Where the script lies beside the package it imports."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    INSTALLED.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", "client.mjs"):
        shutil.copy(HERE / name, INSTALLED)
    if _version(INSTALLED) != _wanted():
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(command, cwd=INSTALLED, capture_output=True, text=True, timeout=120)
        if done.returncode:
            pytest.skip(f"npm cannot install the client: {done.stderr.strip()[-200:]}")
    return INSTALLED / "client.mjs"


def _version(directory: Path) -> str | None:
    package = directory / "node_modules" / "openai" / "package.json"
    return json.loads(package.read_text())["version"] if package.exists() else None


def _wanted() -> str:
    return json.loads((HERE / "package.json").read_text())["dependencies"]["openai"]


def test_the_node_client(node, roomy_url, client):
    """Whole, streamed, parsed, with tools, aborted, and errors of its own types."""
    expected = text_of(ask(client))
    stop = expected[len(expected) // 2 :][:3]
    command = ["node", str(node), f"{roomy_url}/v1", stop]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["models"] == ["tiny"]
    assert told["whole"] == [expected, expected]
    assert told["logprobs"] == 24
    assert told["mars"]["forwards"] == 2 * told["usage"]["mars"]["forwards"] == 48
    assert told["streamed"] == expected
    assert told["stopped"] == expected[: expected.index(stop)]
    assert told["completions"] == 2
    assert told["parsed"]["colour"] in ("red", "green")
    assert told["called"]["function"]["name"] == "paint"
    assert json.loads(told["called"]["function"]["arguments"])["colour"] in ("red", "green")
    assert told["streamedCall"] == told["called"]["function"]
    assert told["errors"] == {
        "BadRequestError": [400, "store", "unsupported_parameter"],
        "NotFoundError": [404, "model", "model_not_found"],
    }
    assert told["aborted"] == "APIUserAbortError"
