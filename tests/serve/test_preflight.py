"""What is said at once, before torch and Ray are imported."""

import json
import resource
import socket
import subprocess
import sys

import pytest

from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.load import parse_job
from mars_ray.config.modes import ConfidenceMode, ExactMode
from mars_ray.config.serve import ServeJob
from mars_ray.errors import ConfigError, MarsError
from mars_ray.serve.openai.request_models import ChatBody, parse
from mars_ray.serve.openai.validation import to_generation_request
from mars_ray.serve.preflight import preflight

# The command's own process, which tells at its end what it has imported.
COMMAND = """
import sys
from mars_ray import cli
try:
    sys.argv[0] = "mars-ray"
    cli.main()
finally:
    print(sorted({"torch", "ray", "transformers"} & set(sys.modules)), file=sys.stderr)
"""


def told(*words: str) -> str:
    """What the command says of these words; within two seconds of a processor's time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", COMMAND, *words], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stderr
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 2
    *said, imported = done.stderr.splitlines()
    assert imported == "[]"
    assert len(said) == 1
    return said[0]


def test_what_is_missing_is_told_within_two_seconds(tmp_path):
    """As one line. Guards a minute of Ray's start before a typing error is named."""
    model, keys = tmp_path / "model", tmp_path / "keys.toml"
    model.mkdir()
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
    job = {"checkpoint": str(tmp_path), "port": 20007}
    with pytest.raises(MarsError, match="/nowhere/"):
        preflight(ServeJob.model_validate(job | wrong))
    for name in ("org/model", "s3://bucket/model", str(tmp_path)):
        preflight(ServeJob.model_validate(job | {"checkpoint": name}))


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
    asked = to_generation_request(parse(ChatBody, body), "id", 1, ServeJob(checkpoint="x"))
    assert asked.mode == ConfidenceMode()
    evaluate = {"kind": "evaluate", "checkpoint": "x", "task": {"type": "corpus"}}
    several = parse_job(evaluate | {"modes": ["exact", {"type": "confidence"}]}, source="a")
    assert isinstance(several, EvaluateJob)
    assert several.modes == (ExactMode(), ConfidenceMode())
    with pytest.raises(ConfigError, match="'exakt'"):
        parse_job(table | {"default_mode": "exakt"}, source="job.toml")
