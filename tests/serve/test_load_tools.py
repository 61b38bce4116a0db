"""Load tools of others run against the live service as they come, and see no failed request.

Each has an environment of its own in .venv-load, or where LOAD_TOOLS says, made at first use.
"""

import os
import subprocess
from pathlib import Path

import httpx
import pytest
from docs.commands import commands
from load_tools import MODEL, TOOLS, Asked, run_tool, shown
from serve.command import command

from mars_ray.cluster.port import free_port
from mars_ray.config.decode import EngineConfig
from mars_ray.config.serve import Limits

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
def service(job, tmp_path_factory):
    """`mars-ray serve` with a tiny model, and its URL."""
    changes = {
        "model_name": MODEL,
        "port": free_port(),
        "cpus_per_replica": 0.5,
        "engine": EngineConfig(max_batch=4, max_context=512, device="cpu", threads=1),
        "limits": Limits(),
    }
    live = job.model_copy(update=changes)
    with command(live, tmp_path_factory.mktemp("load-tools")) as (_, url):
        yield live, url


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", TOOLS)
def test_a_load_tool_runs_unchanged(name, service, tmp_path):
    """Guards routes, fields and usage that a tool takes for granted: each answer arrives, with as
    many tokens as were asked for, by the tool's own report."""
    live, url = service
    found = program(name)
    asked = Asked(url, str(Path(live.checkpoint).absolute()), REQUESTS, 16, TOKENS, clients=2)
    report = run_tool(TOOLS[name], found, asked, tmp_path)
    assert report.failed == 0
    assert report.completed >= REQUESTS
    assert report.output_tokens == report.completed * TOKENS
    assert report.first_token_ms > 0
    assert httpx.get(f"{url}/health").status_code == 200


def test_the_documented_commands_are_those_that_run():
    """Guards a page with options that the tools' next releases do not have."""
    asked = Asked("http://127.0.0.1:8000", "models/smollm2", 32, 64, 32, clients=4)
    texts = {command.text for command in commands()}
    assert {shown(tool, asked) for tool in TOOLS.values()} <= texts
