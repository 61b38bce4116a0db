"""What clients send by habit: each kind with its other members (the threads that report them)."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from serve.asking import ASK, ask, error_of, text_of

from mars_ray.config.serve import Limits
from mars_ray.provenance import provenance
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.openai.request_models import ChatBody, parse
from mars_ray.serve.openai.validation import turns_of

USER = {"role": "user", "content": ASK}


def call(arguments, **more) -> dict:
    function = {"name": "look", "arguments": arguments}
    return {"id": "a", "type": "function", "function": function} | more


RESULT = {"role": "tool", "tool_call_id": "a", "content": "done"}


@pytest.mark.parametrize(
    "messages",
    [
        [USER | {"name": "bob"}],
        [{"role": "system", "content": "Count.", "name": "rules"}, USER],
        [{"role": "developer", "content": "Count.", "name": "rules"}, USER],
        [USER, {"role": "assistant", "content": "one", "name": "ann"}, USER],
        [USER, {"role": "assistant", "tool_calls": [call("{}")]}, RESULT | {"name": "look"}, USER],
    ],
    ids=["user", "system", "developer", "assistant", "tool"],
)
def test_a_speakers_name_is_taken(client, messages):
    """Agent frameworks set it on every turn (Octop#807). It goes on to the chat template."""
    assert ask(client, messages=messages).status_code == 200
    body = parse(ChatBody, json.dumps({"model": "tiny", "messages": messages}).encode())
    given = [message.get("name") for message in messages]
    assert [turn.name for turn in turns_of(body.messages)] == given


@pytest.mark.parametrize(
    "turn",
    [
        {"content": None},
        {"content": ""},
        {"content": []},
        {},
        {"content": None, "tool_calls": None},
        {"content": None, "tool_calls": []},
        {"content": None, "reasoning": "hm"},
        {"content": None, "reasoning_content": "hm"},
    ],
)
def test_a_turn_without_text_is_an_empty_one(client, turn):
    """As a reply of which only thoughts came to be (freellmapi#165, LLMKube#935)."""
    empty = [USER, {"role": "assistant", "content": ""}, USER]
    said = ask(client, messages=[USER, {"role": "assistant"} | turn, USER])
    if "hm" not in turn.values():
        assert text_of(said) == text_of(ask(client, messages=empty))
    assert said.status_code == 200


@pytest.mark.parametrize("arguments", ["", " ", "\n", None, "{}", "{ }"])
def test_empty_arguments_are_none(client, arguments):
    """Of functions without parameters (vllm#19419)."""
    replies = [
        ask(client, messages=[USER, {"role": "assistant", "tool_calls": [call(own)]}, RESULT])
        for own in (arguments, "{}")
    ]
    assert text_of(replies[0]) == text_of(replies[1])


@pytest.mark.parametrize("arguments", ["{", '{"a"', "one"])
def test_arguments_that_are_no_json_are_refused(client, arguments):
    """Nothing is made up for them."""
    messages = [USER, {"role": "assistant", "tool_calls": [call(arguments)]}, RESULT]
    error_of(ask(client, messages=messages), 400)


@pytest.mark.parametrize(
    "turn",
    [
        {"content": "{}", "parsed": {}},
        {"content": "{}", "parsed": None, "refusal": None, "annotations": [], "audio": None},
        {"content": None, "tool_calls": [call("{}", index=0)]},
        {"tool_calls": [call("{}") | {"function": call("{}")["function"]}]},
        {
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "look", "arguments": "{}", "parsed_arguments": {}},
                }
            ]
        },
    ],
    ids=["parse", "create", "joined deltas", "plain", "parsed call"],
)
def test_the_clients_own_objects_are_taken_back(client, turn):
    """Of `create`, `parse`, `stream`, and of who joins deltas (openai-python#2374)."""
    results = [RESULT] if "tool_calls" in turn else []
    reply = ask(client, messages=[USER, {"role": "assistant"} | turn, *results, USER])
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_length_beyond_the_limit_is_cut(client, job, text_engine, field):
    """And told by the header and the finish reason; or refused, if the service says so."""
    fields = {"max_tokens": None, field: 4096}
    reply = ask(client, **fields)
    assert reply.status_code == 200
    assert reply.headers["x-new-tokens-limit"] == str(job.limits.new_tokens)
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert reply.json()["usage"]["completion_tokens"] <= job.limits.new_tokens
    body = {"model": "tiny", "prompt": ASK, "max_tokens": 4096, "temperature": 0}
    whole = client.post("/v1/completions", json=body)
    assert whole.json()["usage"]["completion_tokens"] > 16
    limits = Limits(new_tokens=100, beyond_new_tokens="refuse")
    strict = TestClient(build_api(job.model_copy(update={"limits": limits}), {"tiny": text_engine}))
    error = error_of(ask(strict, **fields), 400)
    assert error["param"] == field


def test_pages_of_other_origins_need_a_permit(client, job, text_engine):
    """A browser asks first (aprender#671): by default nobody is allowed, then who is named."""
    asked = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    path = "/v1/chat/completions"
    assert "access-control-allow-origin" not in client.options(path, headers=asked).headers
    own = job.model_copy(update={"allowed_origins": ("https://a.example",)})
    api = TestClient(build_api(own, {"tiny": text_engine}))
    allowed = api.options(path, headers=asked)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = api.options(path, headers=asked | {"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    body = {"model": "tiny", "messages": [USER], "max_tokens": 2}
    reply = api.post(path, json=body, headers={"Origin": "https://a.example"})
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    wild = job.model_copy(update={"allowed_origins": ("*",)})
    anybody = TestClient(build_api(wild, {"tiny": text_engine})).options(path, headers=asked)
    assert anybody.headers["access-control-allow-origin"] == "*"


@pytest.fixture(scope="module")
def counts() -> Iterator[Counter[str]]:
    """Of the requests for JSON: how many there were, came to their end, were cut in white space."""
    counted: Counter[str] = Counter()
    yield counted
    if path := os.environ.get("JSON_RESULT"):
        result = dict(counted) | {"provenance": provenance()}
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


@pytest.mark.parametrize("temperature", [0, 1, 1.3])
@pytest.mark.parametrize(
    "asked",
    [
        {"type": "json_object"},
        {
            "type": "json_schema",
            "json_schema": {
                "name": "ok",
                "schema": {
                    "type": "object",
                    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
                    "required": ["ok", "n"],
                    "additionalProperties": False,
                },
            },
        },
    ],
    ids=["json_object", "json_schema"],
)
def test_white_space_does_not_run_for_ever(client, asked, temperature, counts):
    """Random weights would write nothing else (vllm#38696): between two parts there is at most a
    new line with its indentation.

    `JSON_SEEDS=84 JSON_RESULT=FILE` asks 504 times and writes how many were cut in white space.
    """
    endless: list[int] = []
    for seed in range(int(os.environ.get("JSON_SEEDS", "3"))):
        fields = {"temperature": temperature, "seed": seed, "max_tokens": 100}
        reply = ask(client, response_format=asked, **fields)
        (choice,) = reply.json()["choices"]
        text, end = choice["message"]["content"], choice["finish_reason"]
        runs_on = "\n\n" in text.replace("\\n", "") or text[-20:].isspace()
        is_cut = end == "length" and runs_on
        endless += [seed] * runs_on
        counts.update(requests=1, whole=end == "stop", cut=is_cut)
        if asked["type"] == "json_schema":
            assert end == "stop"
            json.loads(text)
    assert not endless
