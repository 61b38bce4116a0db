"""API keys: who may ask, how much, and what is never said."""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from serve.written import envelopes

from mars_ray.config.serve import ServeJob
from mars_ray.errors import ConfigError
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.ingress.auth import ApiKeys
from mars_ray.serve.openai.request_models import ApiError
from mars_ray.serve.protocol import (
    ErrorInfo,
    Finish,
    GenerationRequest,
    Message,
    OutputDelta,
    Tokenized,
    TokenizeRequest,
)

SECRET, OTHER = "a-secret-of-24-characters", "another-secret-of-some-30-chars"
FILE = f"""
[[keys]]
name = "hashed"
sha256 = "{hashlib.sha256(SECRET.encode()).hexdigest()}"
answers = 2
new_tokens = 5
[[keys]]
name = "plain"
key = "{OTHER}"
priority = -5
"""


class Counting:
    """A model that remembers its requests and answers each with one piece."""

    def __init__(self) -> None:
        self.calls: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Message, None]:
        self.calls.append(request)
        finish = Finish("stop", 1, 1, 1)
        deltas = [OutputDelta("x", finish, choice) for choice in range(request.choices)]
        for message in envelopes(request, deltas):
            yield message

    async def tokenize(self, asked: TokenizeRequest) -> Tokenized | ErrorInfo:
        return Tokenized((1, 2), 10)

    async def detokenize(self, tokens: tuple[int, ...]) -> str | ErrorInfo:
        return "x"

    async def used(self, request_id: str) -> None:
        return None

    async def is_ready(self) -> bool:
        return True


@pytest.fixture
def backend() -> Counting:
    return Counting()


@pytest.fixture
def client(tmp_path, backend) -> TestClient:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return TestClient(build_api(ServeJob(checkpoint="m", keys_file=str(path)), {"m": backend}))


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def ask(client: TestClient, secret: str, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return client.post("/v1/chat/completions", json=body, headers=bearer(secret))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/version"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ],
)
@pytest.mark.parametrize(
    "headers",
    [{}, bearer("wrong"), bearer(SECRET[:-1]), {"Authorization": SECRET}, {"Authorization": ""}],
    ids=["none", "wrong", "shorter", "no-scheme", "empty"],
)
def test_every_route_asks_for_a_key(client, backend, method, path, headers):
    """Before it reads a byte of the body, which here would be a 400."""
    response = client.request(method, path, headers=headers)
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert backend.calls == []


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/health", "/ping"])
def test_probes_and_the_page_ask_for_none(client, path):
    """Kubernetes has no key; the page asks for it itself."""
    assert client.get(path).status_code == 200


def test_a_key_bounds_how_urgent_its_requests_may_be(client, backend):
    """Whoever may say what goes first could have all others wait; giving way is free."""
    for secret, priority in ((SECRET, 0), (SECRET, 9), (OTHER, -5)):
        assert ask(client, secret, priority=priority).status_code == 200
        assert backend.calls[-1].priority == priority
    for secret, priority in ((SECRET, -1), (OTHER, -6)):
        refused = ask(client, secret, priority=priority)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "priority"


@pytest.mark.parametrize("tokens", [6, 1024, 10**6])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_key_refuses_what_is_beyond_it(client, name, tokens):
    """Also what the service itself would cut."""
    assert ask(client, SECRET, **{name: 5}).status_code == 200
    refused = ask(client, SECRET, **{name: tokens})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == name


def test_both_forms_of_a_key_are_good(client):
    """As its hash, and as it is."""
    for secret in (SECRET, OTHER):
        assert ask(client, secret).status_code == 200
        assert client.get("/v1/models", headers=bearer(secret)).status_code == 200


def test_a_key_limits_tokens(client, backend):
    """More is refused; without a wish the answer is as long as the key allows."""
    assert ask(client, SECRET).status_code == 200
    assert backend.calls[-1].new_tokens_limit == 5
    assert ask(client, SECRET, max_tokens=5).status_code == 200
    refused = ask(client, SECRET, max_tokens=6)
    assert refused.status_code == 400
    assert "'hashed' allows at most 5" in refused.json()["error"]["message"]
    refused = ask(client, SECRET, max_tokens=None, max_completion_tokens=6)
    assert refused.json()["error"]["param"] == "max_completion_tokens"
    assert ask(client, OTHER, max_tokens=6).status_code == 200


def test_a_key_shortens_what_the_request_leaves_open(client, backend):
    """A completion without a wish has OpenAI's 16 tokens, or those of its key; guards a 400 for a
    field that was not sent."""

    def complete(**fields):
        body = {"model": "m", "prompt": "hi"} | fields
        return client.post("/v1/completions", json=body, headers=bearer(SECRET))

    for fields in ({}, {"min_tokens": 20}):
        assert complete(**fields).status_code == 200
        assert backend.calls[-1].max_new_tokens is None
        assert backend.calls[-1].new_tokens_limit == 5
    assert complete(max_tokens=6).json()["error"]["param"] == "max_tokens"


def test_a_key_limits_answers_at_a_time(client, tmp_path):
    """And its places come back, also after a failure."""
    assert ask(client, SECRET, n=2).status_code == 200
    # However often it asks, these would be too many.
    refused = ask(client, SECRET, n=3)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "n"
    keys = ApiKeys(str(tmp_path / "keys.toml"))
    key = keys.holder(f"Bearer {SECRET}")

    def fail() -> None:
        with keys.lease(key, 2):
            with pytest.raises(ApiError) as caught, keys.lease(key, 1):
                pass
            refusal = caught.value.refusal
            assert (refusal.status, refusal.code, refusal.retry_after_s) == (429, "key_limit", 1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with keys.lease(key, 2):
        pass


class Lasting(Counting):
    """A model whose answers begin, and then take as long as they are told to."""

    def __init__(self, *rest: OutputDelta | ErrorInfo) -> None:
        super().__init__()
        self.rest = rest
        self.may_go_on = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Message, None]:
        self.calls.append(request)
        for message in envelopes(request, (OutputDelta("x"), *self.rest)):
            yield message
            await self.may_go_on.wait()


def lasting_api(tmp_path, backend: Lasting) -> FastAPI:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return build_api(ServeJob(checkpoint="m", keys_file=str(path)), {"m": backend})


async def post(api: FastAPI, gone: asyncio.Event, begun: asyncio.Event, **fields) -> int:
    """The status of a request by the key for two answers; its client leaves when `gone` is set."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2} | fields
    said = [{"type": "http.request", "body": json.dumps(body).encode()}]
    statuses = []

    async def receive() -> dict:
        if said:
            return said.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        elif message["body"]:
            begun.set()

    path, headers = "/v1/chat/completions", [(b"authorization", f"Bearer {SECRET}".encode())]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    await api(scope | {"headers": headers}, receive, send)
    return statuses[0]


def test_a_key_gets_its_places_back_when_the_client_leaves(tmp_path):
    """Guards a key that is locked out by streams which nobody reads any more."""

    async def scenario() -> list[int]:
        api = lasting_api(tmp_path, Lasting())
        gone, begun, never = asyncio.Event(), asyncio.Event(), asyncio.Event()
        stream = asyncio.create_task(post(api, gone, begun, stream=True))
        await asyncio.wait_for(begun.wait(), 10)
        statuses = [await post(api, never, asyncio.Event(), stream=True)]
        gone.set()
        statuses.append(await asyncio.wait_for(stream, 10))
        again, left = asyncio.Event(), asyncio.Event()
        stream = asyncio.create_task(post(api, left, again, stream=True))
        await asyncio.wait_for(again.wait(), 10)
        left.set()
        return [*statuses, await asyncio.wait_for(stream, 10)]

    assert asyncio.run(scenario()) == [429, 200, 200]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("last", [ErrorInfo(503, "gone"), OutputDelta("", Finish("stop", 1, 1, 1))])
def test_a_key_gets_its_places_back_when_the_answers_end(tmp_path, stream, last):
    """However they end: by an error on the way, too. The second time none would be left."""

    async def scenario() -> list[int]:
        backend = Lasting(*([last] if isinstance(last, ErrorInfo) else both(last)))
        backend.may_go_on.set()
        api, never = lasting_api(tmp_path, backend), asyncio.Event()
        return [await post(api, never, asyncio.Event(), stream=stream) for _ in range(2)]

    def both(delta: OutputDelta) -> list[OutputDelta]:
        return [replace(delta, choice=choice) for choice in range(2)]

    is_told = isinstance(last, ErrorInfo) and not stream
    assert asyncio.run(scenario()) == [503 if is_told else 200] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing key 'keys'"),
        ("keys = []", "at least 1 item"),
        ("[[keys]]\nname = 'a'", "either key or sha256"),
        (f"[[keys]]\nname = 'a'\nkey = '{SECRET}'\nother = 1", "keys.0.other"),
        (f"[[keys]]\nname = 'a'\nkee = '{SECRET}'", "'keys.0.kee'; did you mean 'keys.0.key'"),
        ("[[keys]]\nname = 'a'\nkey = 1234567812345678", "a valid string; quote it"),
        ("[[keys]]\nname = 'a'\nkey = 'short-secret'", "at least 16 characters"),
        (f"[[keys]]\nname = 'a'\nkey = '{SECRET}'\n" * 2, "same name or value"),
        ("keys = ", "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_without_its_secrets(tmp_path, text, message):
    """When the service starts, not with the first request."""
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        ApiKeys(str(path))
    assert SECRET not in str(caught.value)
    assert "short-secret" not in str(caught.value)
    assert "1234567812345678" not in str(caught.value)
    assert str(caught.value).count(str(path)) == 1, "one error, and no other that follows from it"


def test_a_missing_file_is_refused(tmp_path):
    """Guards a service that everybody may use because of a typing error."""
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys(str(tmp_path / "none.toml"))


def test_a_changed_file_is_taken_up(tmp_path, monkeypatch, caplog):
    """Guards a key that still opens after it was taken back, until a restart of the service."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    old, new = tmp_path / "old", tmp_path / "new"
    for directory, secret in ((old, SECRET), (new, OTHER)):
        directory.mkdir()
        (directory / "keys.toml").write_text(f"[[keys]]\nname = 'a'\nkey = '{secret}'\n")
    # As Kubernetes mounts a secret: a link, replaced as a whole.
    data = tmp_path / "data"
    data.symlink_to(old)
    keys = ApiKeys(str(data / "keys.toml"))
    assert keys.holder(f"Bearer {SECRET}")
    data.unlink()
    data.symlink_to(new)
    assert keys.holder(f"Bearer {SECRET}"), "the file is not looked at for each request"
    now[0] += 5
    assert keys.holder(f"Bearer {OTHER}")
    with pytest.raises(ApiError):
        keys.holder(f"Bearer {SECRET}")
    assert "1 keys are in force" in caplog.text
    assert OTHER not in caplog.text


@pytest.mark.parametrize("break_it", [Path.unlink, lambda path: path.write_text("keys = ")])
def test_a_file_that_breaks_changes_nothing(tmp_path, monkeypatch, caplog, break_it):
    """Guards a service that nobody may use any more, or everybody, because of half a file."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    keys = ApiKeys(str(path))
    break_it(path)
    for _ in range(3):
        now[0] += 5
        assert keys.holder(f"Bearer {SECRET}")
        with pytest.raises(ApiError):
            keys.holder(None)
    assert caplog.text.count("stay in force") == 1, "once, not for each request"
    path.write_text(f"[[keys]]\nname = 'b'\nkey = '{OTHER}'\n")
    now[0] += 5
    assert keys.holder(f"Bearer {OTHER}")


def test_keys_are_not_in_logs(client, caplog):
    """The name is."""
    caplog.set_level("DEBUG")
    assert ask(client, OTHER, user="someone").status_code == 200
    assert '"key": "plain"' in caplog.text
    assert "someone" in caplog.text
    assert OTHER not in caplog.text
    assert json.dumps("hi") not in caplog.text


def test_who_names_no_priority_has_that_of_the_key(tmp_path, backend):
    """Guards a key for what may wait, by which every plain request was refused."""
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "batch"\nkey = "{SECRET}"\npriority = 10\n')
    client = TestClient(build_api(ServeJob(checkpoint="m", keys_file=str(path)), {"m": backend}))
    assert ask(client, SECRET).status_code == 200
    assert backend.calls[-1].priority == 10
    assert ask(client, SECRET, priority=0).status_code == 400
