"""Sums of tokens on a real cluster, where a request goes through four processes."""

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve
from ray.util import list_named_actors
from token_sums import compared, log_sums, page_sums

from mars_ray.cluster.machine import free_port
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.serve.deploy import start

REQUESTS = 48
# Of the page of metrics, for a replica.
PAGE_BYTES = 60_000
REPORT_S = 2.0  # tests/conftest.py
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
            whole = httpx.post(path, json=asked | {"max_tokens": 20}, timeout=60)
            assert whole.status_code == 200
        case 1:
            with httpx.stream("POST", path, json=asked | {"stream": True}, timeout=60) as reply:
                next(reply.iter_lines())
        case 2:
            with suppress(httpx.TimeoutException):
                httpx.post(path, json=asked, timeout=0.15)
        case _:
            httpx.post(path, json=asked | {"timeout_s": 0.1}, timeout=60)


def kill_one() -> None:
    """One of the replicas, without a word to anybody."""
    actors: list[dict] = list_named_actors(all_namespaces=True)
    ray.kill(ray.get_actor(**next(a for a in actors if f"#Replica-{MODEL}#" in a["name"])))


def look(log: Path, url: str) -> tuple[list[dict], str]:
    """The requests in the log, and the page of metrics."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    page = httpx.get(f"{url}/metrics", params={"names": "ray"}, timeout=60).text
    return [line for line in lines if "model" in line], page


@pytest.mark.ray
@pytest.mark.long
def test_a_clusters_log_metrics_and_engines_agree(ray_cluster, job: ServeJob, tmp_path):
    """By replica and by key, though one replica is killed. Guards tokens of a client that has left,
    which only its replica knows, a replica that is asked for them by a request that is being
    cancelled, and a page of metrics that is mostly Ray's."""
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
            sent = [threads.submit(send, url, number) for number in range(REQUESTS)]
            sent[REQUESTS // 2].result()
            kill_one()
            for one in sent:
                one.result()
        lines, page = still(log, url)
        in_all = httpx.get(f"{url}/metrics", timeout=60).content
    finally:
        serve.shutdown()
    endings = Counter(line["ending"] for line in lines)
    # Who leaves before the body is read has asked for nothing.
    assert endings.total() > REQUESTS // 2
    assert min(endings["abort"], endings["deadline_exceeded"], endings["length"]) > 0
    sums = compared(log_sums(lines, MODEL), page_sums(page, MODEL))
    assert sums["equal"], sums
    assert sums["lost"]
    assert 0 < len(sums["alive"]) <= 2
    assert 0 < len(in_all) < 2 * PAGE_BYTES


def still(log: Path, url: str) -> tuple[list[dict], str]:
    """What the log and the page say once they say the same for long enough: the cluster exports
    metrics every few seconds, and forgets twice as late that a replica was there."""
    deadline = time.monotonic() + 90
    before, now, since = None, look(log, url), time.monotonic()
    while before is None or time.monotonic() - since < 2.5 * REPORT_S:
        assert time.monotonic() < deadline, "the counts do not come to rest"
        time.sleep(1)
        before, now = now, look(log, url)
        if before[0] != now[0] or page_sums(before[1], MODEL) != page_sums(now[1], MODEL):
            since = time.monotonic()
    return now
