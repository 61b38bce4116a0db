"""Load tools of others run against the service as they come, and see no failed request.

Each has an environment of its own in .venv-load, or where LOAD_TOOLS says, made at first use.
"""

import os
import subprocess
from pathlib import Path

import pytest
from docs.commands import commands
from load_tools import MODEL, TOOLS, Asked, run_tool, shown
from serve.asking import load_server
from serve.real_port import served

from mars_ray.config.decode import EngineConfig
from mars_ray.config.serve import Limits
from mars_ray.serve.ingress.app import build_api

ROOT = Path(__file__).parents[2]
REQUESTS, TOKENS = 12, 8
# The program of each in its environment, relative to the folder of the environments.
PROGRAMS = {
    "GuideLLM": "guidellm/bin/guidellm",
    "AIPerf": "aiperf/bin/aiperf",
    "vllm bench serve": "vllm/bin/python",
}


def program(name: str) -> str:
    """The program, installed if it is not there; without one there is nothing to test."""
    path = Path(os.environ.get("LOAD_TOOLS", ROOT / ".venv-load")) / PROGRAMS[name]
    if not path.exists() and name == "vllm bench serve":
        path = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm")) / "bin/python"
        if not path.exists():
            pytest.skip("vLLM has no environment here: `make test-vllm` makes it")
    elif not path.exists():
        script = [str(ROOT / "benchmarks/install_load_tool.sh"), str(path.parents[1]), path.name]
        done = subprocess.run(["bash", *script], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{name} cannot be installed here: {done.stderr.strip()[-300:]}")
    return str(path)


@pytest.fixture(scope="module")
def service(job):
    """The URL of a service with a tiny model, and the model's directory."""
    changes = {
        "model_name": MODEL,
        "engine": EngineConfig(max_batch=4, max_context=512, device="cpu", threads=1),
        "limits": Limits(),
    }
    live = job.model_copy(update=changes)
    engine = load_server(live)
    engine.start()
    with served(build_api(live, {MODEL: engine})) as url:
        yield url, live.checkpoint
    engine.stop()


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", TOOLS)
def test_a_load_tool_runs_unchanged(name, service, tmp_path):
    """Guards routes, fields and usage that a tool takes for granted: each answer arrives, with as
    many tokens as were asked for, by the tool's own report."""
    url, checkpoint = service
    found = program(name)
    asked = Asked(url, str(Path(checkpoint).absolute()), REQUESTS, 16, TOKENS, clients=2)
    report = run_tool(TOOLS[name], found, asked, tmp_path)
    assert report.failed == 0
    assert report.completed >= REQUESTS
    assert report.output_tokens == report.completed * TOKENS
    assert report.first_token_ms > 0


def test_the_documented_commands_are_those_that_run():
    """Guards a page with options that the tools' next releases do not have."""
    asked = Asked("http://127.0.0.1:8000", "models/smollm2", 32, 64, 32, clients=4)
    texts = {command.text for command in commands()}
    assert {shown(tool, asked) for tool in TOOLS.values()} <= texts
