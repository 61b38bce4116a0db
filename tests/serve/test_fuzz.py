"""Thousands of made-up requests: `FUZZ_REQUESTS=6000 pytest -s tests/serve/test_fuzz.py`."""

import os

import pytest
from serve.asking import wait_until_free
from serve.fuzzing import PLAIN, SHARES, Fuzzed, fuzz
from serve.real_port import served

from mars_ray.config.serve import Limits
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.loading import load_engine
from mars_ray.serve.ingress.routes import build_api
from mars_ray.serve.replica.llm_server import LLMServer

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "100"))


@pytest.mark.slow
@pytest.mark.timeout(60 + REQUESTS)
def test_no_request_breaks_the_service(job):
    """No 5xx, no answer without its shape, no hang; nothing is held afterwards."""
    limits = Limits(body_bytes=20_000, new_tokens=8, waiting_requests=64, choices=4)
    job = job.model_copy(update={"limits": limits})
    engine, tokenizer = load_engine(job.checkpoint, job.engine)
    text_engine = LLMServer(AsyncEngine(engine), tokenizer, job)
    text_engine.start()
    fuzzed = Fuzzed()
    with served(build_api(job, {"tiny": text_engine})) as url:
        for path in PLAIN:
            fuzz(url, path, 1, 0, fuzzed)
        for path, share in SHARES.items():
            fuzz(url, path, round(REQUESTS * share), 0, fuzzed)
    print(f"\n{fuzzed.table()}")
    assert not fuzzed.failures, "\n".join(fuzzed.failures[:20])
    assert fuzzed.requests >= REQUESTS
    assert not [status for _, status in fuzzed.statuses if status >= 500]
    wait_until_free(text_engine)
    text_engine.stop()
    engine.check_integrity()
    assert engine.pool.in_use == 0
