"""Thousands of made-up requests: `FUZZ_REQUESTS=6000 pytest -s tests/serve/test_fuzz.py`, and with
`FUZZ_RESULT=FILE` what came back of them as JSON.

Of vLLM's engine in its environment, by `make test-vllm`.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve.asking import OneReplica, wait_until_free
from serve.fitting import MODES, fit, fit_tokens
from serve.fuzzing import PLAIN, SHARES, Fuzzed, fuzz
from serve.real_port import served
from serve.vllm_here import ENVIRONMENT, SMALL, needs_vllm
from transformers import PreTrainedTokenizerBase

from mars_ray.config.serve import Limits, ServeJob
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.loading import load_engine
from mars_ray.provenance import provenance
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.openai.request_models import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    parse,
)
from mars_ray.serve.openai.validation import to_request
from mars_ray.serve.replica.engine_client import EngineClient

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": "tiny", "prompt": "x"}
REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "60"))
RESULT = os.environ.get("FUZZ_RESULT")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatBody, CHAT | {"logprobs": 0, "top_logprobs": 3}),
        (ChatBody, CHAT | {"logprobs": "", "top_logprobs": 3}),
        (ChatBody, CHAT | {"stream": 0, "stream_options": {"include_usage": True}}),
        (ChatBody, CHAT | {"stream": [], "stream_options": {"include_usage": True}}),
        (ChatBody, CHAT | {"stream_options": {"include_usage": 1}}),
        (ChatBody, CHAT | {"logit_bias": {"05": 1}}),
        (ChatBody, CHAT | {"logit_bias": {"1" * 12: 1}}),
        (ChatBody, CHAT | {"mode": 3, "window": 2}),
        (ChatBody, CHAT | {"window": 65}),
        (ChatBody, CHAT | {"window": True}),
        (ChatBody, CHAT | {"threshold": 2}),
        (ChatBody, CHAT | {"reasoning_effort": ""}),
        (ChatBody, CHAT | {"chat_template_kwargs": {"enable_thinking": 1}}),
        (ChatBody, CHAT | {"ignore_eos": 1, "tools": []}),
        (ChatBody, CHAT | {"best_of": True}),
        (CompletionBody, TEXT | {"echo": 1, "logprobs": 2}),
        (CompletionBody, TEXT | {"prompt": [True]}),
        (CompletionBody, TEXT | {"prompt": [-1]}),
        (CompletionBody, TEXT | {"stop_token_ids": [-1]}),
        (CompletionBody, TEXT | {"max_tokens": -1}),
        (DetokenizeBody, {"tokens": ["1"]}),
        (DetokenizeBody, {"tokens": ""}),
    ],
)
def test_what_is_wrong_by_itself_stays_wrong(kind, body):
    """Guards a fuzzer that is green because it mends what the service has to refuse."""
    fitting = fit if kind in (ChatBody, CompletionBody) else fit_tokens
    for wrong in (body, fitting(body)):
        with pytest.raises(ApiError):
            parse(kind, json.dumps(wrong).encode())


def test_what_contradicts_itself_is_made_to_fit():
    """And still asks for what it has asked for. Guards a fuzzer that is only ever refused."""
    job = ServeJob(checkpoint="x", limits=Limits(new_tokens=8))
    wrong = {"max_tokens": 900, "n": 7, "best_of": 3, "top_logprobs": 2, "window": 9}
    asked = CHAT | wrong | {"stream_options": {"include_usage": True}, "reasoning_effort": "low"}
    fitted = fit(asked)
    assert set(asked) - {"window"} <= set(fitted)
    assert to_request(parse(ChatBody, json.dumps(fitted).encode()), "id", 1, job)
    assert fit_tokens({"tokens": [1000]}) == {"tokens": [1000 % 330]}
    assert fit_tokens({"model": "tiny", "prompt": "x"}) == {"model": "tiny", "prompt": "x"}


@pytest.fixture
def answered(request, job) -> Iterator[tuple[ServeJob, OneReplica]]:
    """A job with little limits, and a server of its model over the engine that a test names."""
    limits = Limits(body_bytes=20_000, new_tokens=8, waiting_requests=64, choices=4)
    job = job.model_copy(update={"limits": limits})
    if request.param == "vllm":
        job = job.model_copy(update={"engine": SMALL})
        engine, tokenizer = vllm(Path(job.checkpoint))
        yield job, OneReplica(engine, tokenizer, job)
        return
    engine, tokenizer = load_engine(job.checkpoint, job.engine)
    yield job, OneReplica(AsyncEngine(engine), tokenizer, job)
    engine.check_integrity()
    assert engine.pool.in_use == 0


@pytest.mark.slow
@pytest.mark.timeout(400 + REQUESTS)
@pytest.mark.parametrize(
    ("answered", "modes"),
    [
        pytest.param("mars", MODES, id="mars"),
        pytest.param("vllm", ("verified", "exact"), id="vllm", marks=needs_vllm),
    ],
    indirect=["answered"],
)
def test_no_request_breaks_the_service(answered, modes):
    """No 5xx, no answer without its shape, no hang; nothing is held afterwards."""
    job, text_engine = answered
    text_engine.start()
    fuzzed = Fuzzed()
    with served(build_api(job, {"tiny": text_engine})) as url:
        for path in PLAIN:
            fuzz(url, path, 1, 0, fuzzed)
        for path, share in SHARES.items():
            fuzz(url, path, round(REQUESTS * share), 0, fuzzed, modes=modes)
    print(f"\n{fuzzed.table()}")
    if RESULT:
        result = fuzzed.result() | {"provenance": provenance()}
        Path(RESULT).write_text(json.dumps(result, indent=1) + "\n")
    assert not fuzzed.failures, "\n".join(fuzzed.failures[:20])
    assert fuzzed.requests >= REQUESTS
    assert fuzzed.errors == 0
    # Most are wrong on purpose; of the others the engine must have seen some.
    assert all(fuzzed.statuses[path, 200] for path in SHARES)
    wait_until_free(text_engine)
    text_engine.stop()


def vllm(directory: Path) -> tuple[EngineClient, PreTrainedTokenizerBase]:
    # Only here: most environments have no vLLM.
    from mars_ray.serve.replica.vllm_client import loaded

    os.environ.update(ENVIRONMENT)
    return loaded(directory, SMALL)
