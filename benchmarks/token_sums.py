"""Tokens by log, metrics and engines: `python benchmarks/token_sums.py CHECKPOINT [OUTPUT]`.

Starts `mars-ray serve` with two replicas and sends 2,000 requests: whole answers and streams,
several answers at once, clients that leave, time-outs, requests that are refused, more than there
is room for; three times a replica is killed. Afterwards, for each replica that lives, its lines of
the log of requests, its metrics and its engine must have the same sums, and for each key the log
and the metrics. What a killed replica wrote is known to the log alone, as far as it was sent. Exits
with 1 if a sum differs.
"""

import json
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from lib.load_servers import Command, Server, started

from mars_ray.provenance import provenance

RESULT = Path(__file__).parent / "results" / "token_sums.json"
REQUESTS = 2000
MODEL = "sums"
_KEYS = {"team-a": "a-secret-of-24-characters", "team-b": "b-secret-of-24-characters"}
_CLIENTS = 10
# The shares of the requests after which a replica is killed.
_KILLED_AT = (0.25, 0.5, 0.75)
_REPORT_S = 1.0
_STILL_S = 6 * _REPORT_S
_LIMIT_S = 180.0
_SAMPLE = re.compile(r"^ray_mars_(\w+)_total\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(slots=True)
class Sums:
    """Tokens by who wrote them, and by who asked; (prompt, completion) each."""

    by_replica: dict[str, tuple[int, int]] = field(default_factory=dict)
    by_key: dict[str, tuple[int, int]] = field(default_factory=dict)
    engines: dict[str, int] = field(default_factory=dict)  # by replica, without discarded tokens


def log_sums(lines: Iterable[dict[str, Any]], model: str) -> Sums:
    """The sums of a log of requests."""
    sums = Sums()
    for line in lines:
        if line.get("model") != model:
            continue
        tokens = line["prompt_tokens"], line["completion_tokens"]
        if any(tokens):
            _add(sums.by_replica, line.get("replica", "nobody"), tokens)
            _add(sums.by_key, line.get("key", "none"), tokens)
    return sums


def page_sums(page: str, model: str) -> Sums:
    """The sums of `GET /metrics?names=ray`."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, labels, value in _SAMPLE.findall(page):
        of = dict(_LABEL.findall(labels))
        if of.get("model_name") == model:
            counts[name, of.get("key") or of.get("replica", "")] += int(float(value))
    sums = Sums()
    for name, who in counts:
        read, written = "prompt_tokens", "generation_tokens"
        if name == f"key_{read}":
            sums.by_key[who] = counts[name, who], counts[f"key_{written}", who]
        elif name == read:
            sums.by_replica[who] = counts[name, who], counts[written, who]
            sums.engines[who] = counts["engine_tokens", who] - counts["discarded_tokens", who]
    return sums


def compared(log: Sums, page: Sums) -> dict[str, Any]:
    """Both beside each other, over the replicas of the page, and whether all is equal."""
    alive = sorted(page.by_replica)
    lost = sorted(log.by_replica.keys() - page.by_replica.keys())
    of_alive = [log.by_replica.get(name, (0, 0)) for name in alive]
    is_equal = (
        of_alive == [page.by_replica[name] for name in alive]
        and [tokens for _, tokens in of_alive] == [page.engines[name] for name in alive]
        and log.by_key == page.by_key
    )
    return {
        "equal": is_equal,
        "alive": {
            name: {
                "log": _named(log.by_replica.get(name, (0, 0))),
                "metrics": _named(page.by_replica[name]),
                "engine": {"completion": page.engines[name]},
            }
            for name in alive
        },
        "lost": {name: {"log": _named(log.by_replica[name])} for name in lost},
        "keys": {
            name: {
                "log": _named(log.by_key.get(name, (0, 0))),
                "metrics": _named(page.by_key.get(name, (0, 0))),
            }
            for name in sorted(log.by_key.keys() | page.by_key.keys())
        },
    }


def _add(sums: dict[str, tuple[int, int]], name: str, tokens: tuple[int, int]) -> None:
    prompt, completion = sums.get(name, (0, 0))
    sums[name] = prompt + tokens[0], completion + tokens[1]


def _named(tokens: tuple[int, int]) -> dict[str, int]:
    return dict(zip(("prompt", "completion"), tokens, strict=True))


def send(url: str, number: int) -> str:
    """One of ten kinds of requests with a prompt of its own; what became of it."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"stream": True},
        {"n": 2, "stop": ["e", "n"]},
        {"stream": True, "stop": ["o"], "mode": "verified"},
        {"stream": True, "leave": 1, "max_tokens": 60},
        {"stream": True, "leave": 3, "n": 2, "mode": "verified", "max_tokens": 60},
        {"max_tokens": 200, "ignore_eos": True, "patience_s": 0.15},
        {"max_tokens": 200, "ignore_eos": True, "timeout_s": 0.1},
        {"prompt": "one " * 1000},
        {"top_k": -7},
    )
    asked = {"model": MODEL, "prompt": f"{number} one two", "max_tokens": 16, "seed": number}
    asked |= {"mode": "exact"} | kinds[number % len(kinds)]
    leave, patience_s = asked.pop("leave", None), asked.pop("patience_s", 60.0)
    headers = {"Authorization": f"Bearer {list(_KEYS.values())[number // 10 % 2]}"}
    path = f"{url}/v1/completions"
    try:
        if leave is None:
            reply = httpx.post(path, json=asked, headers=headers, timeout=patience_s)
            return str(reply.status_code)
        with httpx.stream("POST", path, json=asked, headers=headers, timeout=60) as reply:
            lines = (line for line in reply.iter_lines() if line)
            for _ in range(leave):
                next(lines, None)
    except httpx.TimeoutException:
        return "not waited for"
    except httpx.TransportError:
        return "cut"
    return "left"


def _run(server: Server, log: Path) -> dict[str, Any]:
    url, begin = server.wait(), time.monotonic()
    kill_at = {round(share * REQUESTS) for share in _KILLED_AT}
    killed = 0

    def one(number: int) -> str:
        nonlocal killed
        if number in kill_at:
            killed += _kill_one(psutil.Process(server.process.pid))
        return send(url, number)

    with ThreadPoolExecutor(_CLIENTS) as threads:
        became = Counter(threads.map(one, range(REQUESTS)))
    page = _still(url)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    asked = [line for line in lines if line.get("model") == MODEL]
    return {
        "requests": REQUESTS,
        "seconds": round(time.monotonic() - begin, 1),
        "replicas_killed": killed,
        "became": dict(sorted(became.items())),
        "lines": len(asked),
        "endings": dict(sorted(Counter(line["ending"] for line in asked).items())),
        **compared(log_sums(asked, MODEL), page_sums(page, MODEL)),
    }


def _kill_one(process: psutil.Process) -> bool:
    """Kills the process of the service's oldest replica."""
    for child in sorted(process.children(recursive=True), key=lambda child: child.pid):
        # A process that has just ended has no name.
        with suppress(psutil.Error):
            if f"Replica-{MODEL}" in " ".join(child.cmdline()[:1]):
                child.send_signal(signal.SIGKILL)
                return True
    return False


def _still(url: str) -> str:
    """The page of metrics once two replicas have reported and nothing changes any more."""
    page, since = "", time.monotonic()
    deadline = since + _LIMIT_S
    while time.monotonic() < deadline:
        headers = {"Authorization": f"Bearer {_KEYS['team-a']}"}
        reply = httpx.get(f"{url}/metrics", params={"names": "ray"}, headers=headers, timeout=60)
        # Gauges of rates change for ever, counters do not.
        now = "\n".join(sorted(map("".join, _SAMPLE.findall(reply.text))))
        if now != page:
            page, since = now, time.monotonic()
        elif time.monotonic() - since > _STILL_S and len(_replicas(reply.text)) == 2:
            return reply.text
        time.sleep(_REPORT_S)
    raise RuntimeError(f"the metrics of two replicas were not still within {_LIMIT_S:g} s")


def _replicas(page: str) -> set[str]:
    return set(re.findall(r'ray_mars_num_requests_running\{.*?replica="(\w+)"', page))


def main() -> None:
    """Writes the result; exits with 1 if sums differ."""
    checkpoint, *output = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="mars") as directory:
        keys, log = Path(directory, "keys.toml"), Path(directory, "requests.jsonl")
        keys.write_text(
            "".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in _KEYS.items())
        )
        words = [sys.executable, "-m", "mars_ray", "serve", checkpoint, "port={port}"]
        words += [f"model_name={MODEL}", "replicas=2", "cpus_per_replica=0.5", "drain_s=5"]
        words += ["engine.dtype=float32", "engine.device=cpu", "engine.threads=1"]
        words += ["engine.max_batch=4", "engine.max_context=600", "limits.waiting_requests=4"]
        words += [f"keys_file={keys}", f"request_log={log}"]
        milliseconds = {"RAY_metrics_report_interval_ms": str(round(_REPORT_S * 1000))}
        environment = milliseconds | {"RAY_TMPDIR": directory}
        with started(Command(words, "/readyz", environment)) as server:
            result = _run(server, log)
    result |= {"checkpoint": Path(checkpoint).name, "provenance": provenance()}
    text = json.dumps(result, indent=1)
    print(text)
    Path(*output or [RESULT]).write_text(text + "\n")
    sys.exit(not result["equal"])


if __name__ == "__main__":
    main()
