"""A line of JSON for each request: what it says, and what it must not."""

import json
import logging

import pytest
from fastapi.testclient import TestClient
from serve.asking import ASK, ask
from serve.saying import Saying
from serve.written import envelopes

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.serve.ingress import middleware
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.ingress.middleware import Gate, RequestLog
from mars_ray.serve.protocol import (
    ErrorInfo,
    Finish,
    GenerationRequest,
    OutputDelta,
)


@pytest.fixture
def lines(caplog):
    """The lines since the last look."""
    caplog.set_level(logging.INFO, "mars_ray.requests")

    def take() -> list[dict]:
        made = [json.loads(r.message) for r in caplog.records if r.name == "mars_ray.requests"]
        caplog.clear()
        return made

    return take


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_says_what_was_asked_and_done(client, lines, stream):
    """Who, what, how long, how it ended; not a word of the conversation."""
    metadata = {"team": "a"}
    reply = ask(client, mode="verified", user="someone", stream=stream, metadata=metadata)
    (line,) = lines()
    times = {name: line.pop(name) for name in ("time", "first_token_s", "total_s")}
    assert 0 < times["first_token_s"] <= times["total_s"] < 60
    assert line.pop("id") in reply.text
    assert line.pop("prompt_tokens") > 10
    assert line.pop("cached_tokens") % 16 == 0  # whole pages
    assert 1 <= line.pop("forwards") <= 24
    assert line == {
        "method": "POST",
        "path": "/v1/chat/completions",
        "user": "someone",
        "metadata": {"team": "a"},
        "model": "tiny",
        "mode": "verified",
        "status": 200,
        "ending": "length",
        "completion_tokens": 24,
        "disagreed": 0,
    }


def test_the_end_user_has_two_names(client, lines):
    """OpenAI's new one and its old one."""
    ask(client, safety_identifier="new")
    ask(client, safety_identifier="new", user="old")
    assert [line["user"] for line in lines()] == ["new", "old"]


def test_every_way_to_end_has_its_name(job, client, lines):
    """An error's code; `abort` where the client left before the end."""
    ask(client, stop=[""])
    ask(client, model="other")
    client.get("/v1/nothing")
    client.get("/healthz")
    bad, missing, nothing = lines()
    assert (bad["status"], bad["ending"]) == (400, "invalid_value")
    assert (missing["status"], missing["ending"]) == (404, "model_not_found")
    assert (nothing["status"], "ending" in nothing) == (404, False)
    lost = ErrorInfo(503, "lost", code="replica_lost")
    ask(TestClient(build_api(job, {"tiny": Saying(OutputDelta("x"), lost)})), stream=True)
    assert lines()[0]["ending"] == "replica_lost"
    two = [OutputDelta("x", Finish("stop", 3, 4, 2), choice=n) for n in range(2)]
    ask(TestClient(build_api(job, {"tiny": Saying(*two)})), n=2)
    (line,) = lines()
    assert (line["ending"], line["completion_tokens"], line["forwards"]) == ("stop", 8, 4)
    assert line["prompt_tokens"] == 3
    gate = Gate(is_open=False)
    ask(TestClient(build_api(job, {"tiny": Saying()}, gate)))
    assert lines()[0]["status"] == 503


def test_a_client_that_leaves_one_answer_of_two_is_told_of():
    """Guards an `abort` that is lost behind the reason for which another answer ended."""
    log = RequestLog(None, "POST", "/v1/chat/completions")
    request = GenerationRequest("a", ("x",), ExactMode(), Sampling(), None, 9, n=2)
    log.sent(request, with_prompt=False)
    finish = Finish("stop", 1, 1, 1)
    deltas = [OutputDelta("x", finish, choice) for choice in range(2)]
    for message, ending in zip(envelopes(request, deltas), ("abort", "stop"), strict=True):
        log.on_message(message)
        assert json.loads(log.line())["ending"] == ending


def test_prompts_are_logged_only_if_asked_for(job, lines):
    """The answer never is."""
    said = Saying(OutputDelta("secret answer", Finish("stop", 1, 1, 1)))
    ask(TestClient(build_api(job, {"tiny": said})))
    assert ASK not in json.dumps(lines())
    talkative = job.model_copy(update={"log_prompts": True})
    ask(TestClient(build_api(talkative, {"tiny": said})))
    (line,) = lines()
    assert line["prompt"] == [[{"role": "user", "content": ASK}]]
    assert "secret answer" not in json.dumps(line)


@pytest.mark.parametrize(
    ("given", "logged"),
    [("req-1.a:b", "req-1.a:b"), ('a"b\tc d', "a_b_c_d"), ("x" * 500, "x" * 128), ("", None)],
)
def test_a_request_id_of_the_client_is_kept_but_cleaned(client, lines, given, logged):
    """Guards lines and dashboards against what a header can hold."""
    client.get("/v1/models", headers={"x-request-id": given})
    assert lines()[0].get("request_id") == logged


def test_what_the_page_polls_and_loads_leaves_a_line_only_if_it_is_refused(
    job, client, lines, tmp_path
):
    """Guards a log that a page left open fills, and one that does not know of wrong keys."""
    for path in ("/", "/v1/mars/status", "/page/main.mjs", "/healthz"):
        assert client.get(path).status_code == 200
    assert lines() == []
    assert client.get("/page/other.mjs").status_code == 404
    assert [line["status"] for line in lines()] == [404]
    keys = tmp_path / "keys.toml"
    keys.write_text("[[keys]]\nname = 'a'\nkey = 'a-secret-of-24-characters'")
    locked = build_api(job.model_copy(update={"keys_file": str(keys)}), {"tiny": Saying()})
    assert TestClient(locked).get("/v1/mars/status").status_code == 401
    (line,) = lines()
    assert (line["path"], line["ending"]) == ("/v1/mars/status", "invalid_api_key")


def test_lines_go_to_a_file(client, tmp_path, monkeypatch):
    """One line each, behind what is there already; where standard output is somebody else's."""
    path = tmp_path / "requests.jsonl"
    path.write_text("{}\n")
    logger = logging.getLogger("mars_ray.requests")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    middleware.write_to(str(path))
    assert ask(client, messages=[{"role": "user", "content": "a\nb"}]).status_code == 200
    assert ask(client).status_code == 200
    assert [json.loads(line).get("status") for line in path.open()] == [None, 200, 200]
