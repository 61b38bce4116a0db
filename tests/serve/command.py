"""`mars-ray serve` as its users start it, and what is asked of a service from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from mars_ray.cluster.machine import free_port
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.serve.ingress.proxy import LIMIT_HEADER

CHAT = [{"role": "user", "content": "count from one to ten"}]
TOKENS = 200


@contextmanager
def command(
    job: ServeJob, directory: Path, *options: str
) -> Iterator[tuple[subprocess.Popen, str]]:
    """`mars-ray serve` in a process group of its own, as in a terminal, and its URL."""
    path = directory / "job.json"
    table = job.model_dump(mode="json", exclude_unset=True, exclude={"kind", "checkpoint"})
    overrides = [f"{key}={json.dumps(value)}" for key, value in flat(table)]
    words = [sys.executable, "-m", "mars_ray", "serve", *options, job.checkpoint, *overrides]
    process = subprocess.Popen(words, start_new_session=True, stderr=path.open("w"))
    url = f"http://127.0.0.1:{job.port}"
    try:
        while not answers(url):
            assert process.poll() is None, path.read_text()
            time.sleep(0.1)
        yield process, url
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def flat(table: dict, before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        else:
            yield before + key, value


def with_room(job: ServeJob, tokens: int) -> ServeJob:
    """A job that can be started, for answers of so many tokens."""
    return job.model_copy(
        update={
            "port": free_port(),
            "cpus_per_replica": 0.5,
            "default_mode": ExactMode(),
            "limits": Limits(new_tokens=tokens),
            "engine": job.engine.model_copy(update={"max_context": tokens + 60}),
        }
    )


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def read(url: str, stream: bool, tokens: int = TOKENS) -> tuple[int, str]:
    """Status and text; the text of a stream that is cut raises."""
    body = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": tokens}
    where = f"{url}/v1/chat/completions"
    with httpx.stream("POST", where, json=body | {"stream": stream}, timeout=60) as reply:
        if reply.status_code != 200:
            return reply.status_code, reply.headers.get("Retry-After", "")
        # Serve's proxy has taken it away: it drops slow readers.
        assert LIMIT_HEADER not in reply.headers
        if not stream:
            return 200, json.loads(reply.read())["choices"][0]["message"]["content"]
        *events, done = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        assert done == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        return 200, "".join(delta.get("content", "") for delta in deltas)


def until_refused(url: str, stream: bool, texts: list[str]) -> None:
    """Add the texts of all replies until one is refused, or nobody is there any more."""
    while True:
        try:
            status, text = read(url, stream)
        except httpx.ConnectError:
            return  # who is that late has asked nobody
        except httpx.RemoteProtocolError as error:
            # Nor has he, unless the log of answered requests has one more.
            if "without sending a response" not in str(error):
                raise
            return
        if status != 200:
            assert (status, int(text) > 0) == (503, True)
            return
        texts.append(text)


def answered(log: Path) -> int:
    """Requests that the service says it has answered."""
    lines = log.read_text().splitlines() if log.exists() else []
    return sum(json.loads(line)["status"] == 200 for line in lines)


def loses_nothing_at_sigterm(process: subprocess.Popen, url: str, log: Path) -> None:
    """Clients ask on and on: whatever was let in is whole and right, then there are refusals."""
    before = answered(log)
    with ThreadPoolExecutor(6) as pool:
        expected = read(url, stream=False)
        texts: list[list[str]] = [[] for _ in range(6)]
        clients = [
            pool.submit(until_refused, url, number % 2 == 0, own)
            for number, own in enumerate(texts)
        ]
        wait_for(lambda: all(texts) or any(client.done() for client in clients), 240)
        process.terminate()
        for client in clients:
            client.result(60)
        assert process.wait(30) == 0
    assert all(texts)
    assert {text for own in texts for text in own} == {expected[1]}
    assert answered(log) - before == 1 + sum(map(len, texts))


def wait_until_free(url: str) -> None:
    """Neither a request is left, nor a page of the cache."""

    def is_free() -> bool:
        (model,) = httpx.get(f"{url}/v1/mars/status").json()["data"]
        return (model["running"], model["waiting"], model["kv_cache_usage"]) == (0, 0, 0)

    wait_for(is_free)


def wait_for(condition: Callable[[], bool], within_s: float = 30) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < within_s
        time.sleep(0.1)
