"""Sums of tokens on a real cluster, where a request goes through four processes."""

import json
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from ray import serve

from mars_ray.cluster.port import free_port
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.serve.deploy import start

REQUESTS = 48
# A name that no other service of the tests' cluster has.
MODEL = "sums"


def send(url: str, number: int) -> None:
    """A whole answer, a stream that is left, a whole answer that is not waited for, or one that is
    late; all but the first are longer than their clients have patience."""
    asked = {"model": MODEL, "prompt": f"{number} one two", "max_tokens": 400, "ignore_eos": True}
    asked |= {"mode": "exact", "seed": number}
    path = f"{url}/v1/completions"
    match number % 4:
        case 0:
            assert httpx.post(path, json=asked | {"max_tokens": 20}, timeout=60).status_code == 200
        case 1:
            with httpx.stream("POST", path, json=asked | {"stream": True}, timeout=60) as reply:
                next(reply.iter_lines())
        case 2:
            with suppress(httpx.TimeoutException):
                httpx.post(path, json=asked, timeout=0.15)
        case _:
            httpx.post(path, json=asked | {"timeout_s": 0.1}, timeout=60)


def in_log(path: Path) -> Counter[str]:
    """Tokens and requests."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    asked = [line for line in lines if "model" in line]
    counts = Counter({line["ending"]: 0 for line in asked}, requests=len(asked))
    for line in asked:
        counts["prompt"] += line["prompt_tokens"]
        counts["written"] += line["completion_tokens"]
        counts[line["ending"]] += 1
    return counts


def in_metrics(url: str) -> Counter[str]:
    """The same of the replicas, and by key of the ingress."""
    page = httpx.get(f"{url}/metrics", timeout=60).text
    names = {
        "mars_prompt_tokens": "prompt",
        "mars_generation_tokens": "written",
        "mars_key_prompt_tokens": "prompt by key",
        "mars_key_generation_tokens": "written by key",
    }
    counts = Counter[str]()
    line = re.compile(r"^ray_(\w+)_total\{(.*)\} ([\d.e+]+)$", re.MULTILINE)
    for name, labels, value in line.findall(page):
        if name in names and (f'"Replica-{MODEL}"' in labels or f'model="{MODEL}"' in labels):
            counts[names[name]] += int(float(value))
    return counts


@pytest.mark.ray
@pytest.mark.slow
def test_a_clusters_log_and_metrics_agree(ray_cluster, job: ServeJob, tmp_path):
    """Guards tokens of a client that has left, which only its replica knows, and a replica that is
    asked for them by a request that is being cancelled."""
    log = tmp_path / "requests.jsonl"
    sizes = job.engine.model_copy(update={"max_context": 600})
    changes = {
        "model_name": MODEL,
        "replicas": 2,
        "cpus_per_replica": 0.5,
        "engine": sizes,
        "port": free_port(),
    }
    limits = Limits(new_tokens=500)
    url = start(job.model_copy(update=changes | {"request_log": str(log), "limits": limits}))
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda number: send(url, number), range(REQUESTS)))
        # Ray exports metrics every ten seconds.
        before, now = None, (in_log(log), in_metrics(url))
        while before != now:
            time.sleep(11)
            before, now = now, (in_log(log), in_metrics(url))
        lines, metrics = now
    finally:
        serve.shutdown()
    # Who leaves before the body is read has asked for nothing.
    assert lines["requests"] > REQUESTS // 2
    assert lines["abort"] > 0
    assert lines["deadline_exceeded"] > 0
    assert lines["written"] == metrics["written"] == metrics["written by key"]
    assert lines["prompt"] == metrics["prompt"] == metrics["prompt by key"]
