"""What an answer can be asked to be: continued texts, several at once, with figures beside them."""

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from serve.asking import ASK, ask, error_of, streamed, text_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.serve.protocol import (
    ErrorInfo,
    GenerationRequest,
    Message,
    TokenizeRequest,
    Turn,
)


def complete(client: TestClient, **fields: Any):
    request = {"model": "tiny", "prompt": "one two", "temperature": 0, "max_tokens": 8}
    return client.post("/v1/completions", json=request | fields)


def test_a_completion_continues_its_text(client, checkpoint):
    """Against plain transformers, and the same from tokens as from text."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt = tokenizer("one two", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    expected = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :]).rstrip("\ufffd")
    for given in ("one two", prompt["input_ids"][0].tolist()):
        choices = complete(client, prompt=given).json()["choices"]
        assert [choice["text"] for choice in choices] == [expected]
    refused = error_of(complete(client, prompt="x " * 400), 400)
    assert (refused["param"], refused["code"]) == ("prompt", "context_length_exceeded")
    assert error_of(complete(client, prompt=[100_000]), 400)["code"] == "invalid_value"
    assert error_of(complete(client, prompt=""), 400)["param"] == "prompt"


def test_several_prompts_and_answers_keep_their_places(client):
    """Choice i * n + j is the j-th answer to prompt i, whatever finishes first."""
    alone = [complete(client, prompt=p).json()["choices"][0]["text"] for p in ("one", "two")]
    both = complete(client, prompt=["one", "two"], n=2).json()
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in both["choices"]]
    assert texts == [alone[0], alone[0], alone[1], alone[1]]
    assert both["usage"]["completion_tokens"] == 32
    sampled = complete(client, temperature=1.5, n=3, seed=5).json()["choices"]
    assert len({choice["text"] for choice in sampled}) == 3
    assert sampled[0] == complete(client, temperature=1.5, seed=5).json()["choices"][0]
    stream = streamed(complete(client, prompt=["one", "two"], n=2, stream=True))
    joined = dict.fromkeys(range(4), "")
    for chunk in stream:
        choice = chunk["choices"][0]
        joined[choice["index"]] += choice["text"]
    assert list(joined.values()) == texts


def test_logprobs_are_those_of_the_text(client):
    """Their bytes join to the text, the chosen token is the likeliest, streamed or not."""
    fields = {"logprobs": True, "top_logprobs": 3, "mode": "verified"}
    choice = ask(client, **fields).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 24
    joined = bytes(byte for entry in content for byte in entry["bytes"])
    assert joined.decode("utf-8", "replace").rstrip("\ufffd") == choice["message"]["content"]
    for entry in content:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert tops == sorted(tops, reverse=True)
        assert entry["logprob"] == pytest.approx(tops[0])
        assert entry["logprob"] <= 0
    chunks = streamed(ask(client, **fields, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    streamed_tokens = [entry["token"] for part in parts if part for entry in part["content"]]
    assert streamed_tokens == [entry["token"] for entry in content]
    assert ask(client).json()["choices"][0]["logprobs"] is None


def test_forwards_are_told_on_request(client):
    """Which forward every token came from, in whole answers and in chunks."""
    fields = {"mode": "confidence", "threshold": 0.0, "return_forwards": True}
    forwards = ask(client, **fields).json()["choices"][0]["mars"]["forwards"]
    assert len(forwards) == 24
    assert forwards == sorted(forwards)
    chunks = streamed(ask(client, **fields, stream=True))
    told = [chunk["choices"][0].get("mars") for chunk in chunks]
    assert [mars["forward"] for mars in told if mars for _ in range(mars["tokens"])] == forwards


def test_disagreement_is_told(client):
    """A threshold of 0 takes everything the untrained masks say; `verified` takes nothing."""
    eager = ask(client, mode="confidence", threshold=0.0).json()["usage"]["mars"]
    assert 0.3 < eager["disagreement"] < 0.9
    assert ask(client, mode="verified").json()["usage"]["mars"]["disagreement"] == 0


def test_penalties_and_biases_reach_the_engine(client):
    """One of each: what they do is tested with the engine."""
    plain = text_of(ask(client))
    assert text_of(ask(client, logit_bias={"10": 100}, max_tokens=5)) != plain[:5]
    long = text_of(ask(client, max_tokens=90))
    assert text_of(ask(client, max_tokens=90, frequency_penalty=-2.0)) != long
    assert text_of(ask(client, max_tokens=90, repetition_penalty=1.5)) != long
    assert error_of(ask(client, logit_bias={"100000": 1}), 400)["param"] == "logit_bias"


def test_tokens_and_text_of_a_prompt(client, checkpoint):
    """What a request would count, and back."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    made = client.post("/tokenize", json={"prompt": "one two"}).json()
    expected = tokenizer("one two")["input_ids"]
    assert made == {"count": len(expected), "max_model_len": 160, "tokens": expected}
    back = client.post("/detokenize", json={"tokens": expected}).json()
    assert back == {"prompt": "one two"}
    messages = [{"role": "user", "content": ASK}]
    count = client.post("/tokenize", json={"messages": messages}).json()["count"]
    assert count == ask(client).json()["usage"]["prompt_tokens"]
    assert error_of(client.post("/tokenize", json={}), 400)["param"] == "prompt"
    assert error_of(client.post("/detokenize", json={"tokens": [10**6]}), 400)["param"] == "tokens"


def test_long_prompts_are_encoded_beside_the_loop(text_engine, monkeypatch):
    """Guards streams that stand still meanwhile; short ones are not worth a thread."""
    encode, threads = text_engine._chat.encode, []

    def seen(*given, **options):
        threads.append(threading.current_thread())
        return encode(*given, **options)

    monkeypatch.setattr(text_engine._chat, "encode", seen)

    async def first(prompt: str | tuple[Turn, ...]) -> Message:
        await text_engine.tokenize(TokenizeRequest(prompt))
        call = GenerationRequest("a", (prompt,), ExactMode(), Sampling(), 1, 100)
        async with aclosing(text_engine.generate(call)) as messages:
            return await anext(messages)

    for text in ("one two", "one two " * 5000):
        for prompt in (text, (Turn("user", text),)):
            assert isinstance(asyncio.run(first(prompt)), ErrorInfo) == (len(text) > 10)
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True] * 4 + [False] * 4


def test_the_page_asks_nobody_else(client):
    """No script, font or style from another site, and nothing may be added to it."""
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text
