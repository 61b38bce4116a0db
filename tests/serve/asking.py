"""How tests ask the API, and read what it says."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fastapi.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from mars_ray.config.serve import ServeJob
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.loading import load_engine
from mars_ray.serve.replica.llm_server import LLMServer
from mars_ray.serve.replica.stats import AnswerStats
from mars_ray.serve.status import ReplicaStatus

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


def greedy(checkpoint: str | Path, content: str, tokens: int) -> list[int]:
    """The answer of plain transformers, without any of our code."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    chat = [{"role": "user", "content": content}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)
    return out[0, prompt["input_ids"].shape[1] :].tolist()


class OneReplica(LLMServer):
    """A server in this process, as the routes know a model: all of its replicas."""

    async def status(self) -> list[ReplicaStatus]:
        return [await super().status()]

    async def decided(self) -> None:
        """No policy controls it."""


def load_server(job: ServeJob, observe: Callable[[AnswerStats], None] | None = None) -> OneReplica:
    """A server over an engine of this process; it is not started."""
    engine, tokenizer = load_engine(job.checkpoint, job.engine)
    return OneReplica(AsyncEngine(engine, job.checkpoint), tokenizer, job, observe)


def wait_until_free(engine: LLMServer) -> None:
    """Those who left are gone from the engine within seconds, on however slow a machine."""
    begin = time.monotonic()
    while engine.open_answers:
        assert time.monotonic() - begin < 10
        time.sleep(0.01)
