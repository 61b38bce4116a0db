"""How tests ask the API, and read what it says."""

import json
import time
from typing import Any

from fastapi.testclient import TestClient

from mars_ray.config.serve import ServeJob
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.loading import load_engine
from mars_ray.serve.replica.llm_server import LLMServer
from mars_ray.serve.replica.stats import Observer

ASK = "count from one to ten"


def ask(client: TestClient, **fields: Any):
    request = {"model": "tiny", "temperature": 0, "max_tokens": 24, "mode": "exact"}
    messages = [{"role": "user", "content": ASK}]
    return client.post("/v1/chat/completions", json=request | {"messages": messages} | fields)


def text_of(response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def streamed(response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def error_of(response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def load_server(job: ServeJob, observer: Observer | None = None) -> LLMServer:
    """A server over an engine of this process; it is not started."""
    engine, tokenizer = load_engine(job.checkpoint, job.engine)
    return LLMServer(AsyncEngine(engine, job.checkpoint), tokenizer, job, observer)


def wait_until_free(engine: LLMServer) -> None:
    """Those who left are gone from the engine within seconds, on however slow a machine."""
    begin = time.monotonic()
    while engine.open_answers:
        assert time.monotonic() - begin < 10
        time.sleep(0.01)
