"""What keeps strangers out that no other test of the service guards."""

import hmac
import logging
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openai.types import chat, completion_create_params
from serve.asking import ask, error_of
from serve.saying import Saying
from starlette.routing import Mount

from mars_ray.config.serve import ServeJob
from mars_ray.errors import ConfigError
from mars_ray.serve import deploy
from mars_ray.serve.deploy import build_app
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.ingress.auth import ApiKeys
from mars_ray.serve.openai.request_models import ApiError, ChatBody, CompletionBody, no_ops_of

OPEN = {"/", "/healthz", "/readyz", "/health", "/ping"}
SECRETS = [f"a-secret-of-24-characters-{number}" for number in range(5)]


@pytest.fixture
def keys_file(tmp_path) -> str:
    path = tmp_path / "keys.toml"
    keys = (f'[[keys]]\nname = "{n}"\nkey = "{key}"\n' for n, key in enumerate(SECRETS))
    path.write_text("".join(keys))
    return str(path)


def routes(api: FastAPI) -> Iterator[tuple[str, str]]:
    for route in api.routes:
        if not isinstance(route, Mount):  # the page's files, which hold no data
            for method in route.methods:  # type: ignore[attr-defined]
                yield method, route.path  # type: ignore[attr-defined]


def test_no_route_is_forgotten_where_keys_are_asked_for(keys_file):
    """Of all that there are, metrics and the description too; only page and probes are open."""
    api = build_api(ServeJob(checkpoint="m", keys_file=keys_file), {"m": Saying()})
    client = TestClient(api)
    status = {path: client.request(method, path).status_code for method, path in routes(api)}
    assert {path for path, code in status.items() if code != 401} == OPEN
    assert len(status) > 8


@pytest.mark.parametrize("secret", [*SECRETS, "none of them"])
def test_every_key_is_compared_whichever_is_right(keys_file, secret, monkeypatch):
    """Guards a loop that ends at the right key, and a comparison that ends at the first byte."""
    compared = []
    compare = hmac.compare_digest

    def count(*digests: str) -> bool:
        compared.append(digests)
        return compare(*digests)

    monkeypatch.setattr(hmac, "compare_digest", count)
    keys = ApiKeys(keys_file)
    if secret in SECRETS:
        assert keys.holder(f"Bearer {secret}")
    else:
        with pytest.raises(ApiError):
            keys.holder(f"Bearer {secret}")
    assert len(compared) == len(SECRETS)
    assert {len(digest) for pair in compared for digest in pair} == {64}


def test_strangers_are_kept_out_by_default(job, keys_file, caplog):
    """Loopback unless told otherwise; a service for all that asks nobody says so when it starts."""
    caplog.set_level(logging.WARNING)
    assert ServeJob(checkpoint="m").host == "127.0.0.1"
    build_app(job)
    wide = job.model_copy(update={"host": "0.0.0.0"})
    build_app(wide.model_copy(update={"keys_file": keys_file}))
    assert not caplog.records
    build_app(wide)
    assert "asks nobody for a key" in caplog.text


def test_an_update_does_not_let_strangers_in(job, keys_file, monkeypatch):
    """Guards a job that leaves keys_file out: what an update does not name is not kept."""
    before = job.model_copy(update={"keys_file": keys_file})
    monkeypatch.setattr(deploy, "_running", lambda: (None, before, 0.0))
    with pytest.raises(ConfigError, match="names no keys_file"):
        deploy.update(job)


@pytest.mark.ray
def test_rays_own_api_asks_for_a_token(ray_cluster):
    """Whoever may submit jobs may run anything (CVE-2023-48022)."""
    url = f"http://{ray_cluster.dashboard_url}"
    for path in ("/api/version", "/api/jobs/", "/api/serve/applications/"):
        assert httpx.get(url + path).status_code == 401


@pytest.mark.parametrize(
    "field", ["chat_template", "chat_template_kwargs.x", "add_generation_prompt", "documents"]
)
def test_a_template_does_not_come_with_a_request(client, field):
    """A Jinja template is a program."""
    outer, _, inner = field.partition(".")
    asked = {outer: {inner: "{{ 1 }}"} if inner else "{{ 1 }}"}
    refused = error_of(ask(client, **asked), 400)
    assert (refused["param"], refused["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "known", "ours"),
    [
        ("/v1/chat/completions", chat.completion_create_params, ChatBody),
        ("/v1/completions", completion_create_params, CompletionBody),
    ],
    ids=["chats", "completions"],
)
def test_no_field_that_openai_knows_is_ignored(client, path, known, ours):
    """Each is acted on, or named in the refusal: also of those whose harmless values pass."""
    fields = set(known.CompletionCreateParamsNonStreaming.__annotations__)
    assert len(fields) > 15
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    body = {name: value for name, value in body.items() if name in ours.model_fields}
    no_ops = no_ops_of(ours) - {"prompt_cache_key"}  # of which any value is harmless
    assert len(fields & no_ops) > 0
    for field in fields - (set(ours.model_fields) - no_ops):
        assert client.post(path, json=body | {field: None, "max_tokens": 1}).status_code == 200
        refused = error_of(client.post(path, json=body | {field: "x"}), 400)
        assert (refused["param"], refused["code"]) == (field, "unsupported_parameter")
