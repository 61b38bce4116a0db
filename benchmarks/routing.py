"""What prefix-aware routing gains: `python benchmarks/routing.py CHECKPOINT [ROUNDS]`.

Holds several conversations of several turns at a time with a service of two replicas, with each
router in turn, and prints one JSON object. `hit_share` is the share of prompt tokens that were in a
cache.
"""

import json
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import ray
from ray import serve

from mars_ray.cluster.port import free_port
from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import ServeJob
from mars_ray.data.corpus import problems
from mars_ray.provenance import provenance
from mars_ray.serve.deploy import start

Router = Literal["prefix", "power_of_two"]
_ROUTERS: tuple[Router, ...] = ("prefix", "power_of_two")
_CONVERSATIONS, _TURNS, _AT_A_TIME, _NEW_TOKENS = 24, 5, 4, 24
# Replicas export their counters about every second, and Ray's agent every few seconds.
_EXPORTED_S = 15.0


def main() -> None:
    """Run interleaved rounds of both routers; print medians over the rounds."""
    checkpoint, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    ray.init(address="local", num_cpus=4, include_dashboard=True, log_to_driver=False)
    measured: dict[Router, list[dict[str, float]]] = {router: [] for router in _ROUTERS}
    for number in range(rounds):
        for router in _ROUTERS:
            measured[router].append(_round(checkpoint, router, seed=number))
    result: dict[str, Any] = {
        router: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for router, runs in measured.items()
    }
    result |= {"conversations": _CONVERSATIONS, "turns": _TURNS, "at_a_time": _AT_A_TIME}
    print(json.dumps(result | {"rounds": rounds, "provenance": provenance()}, indent=1))


def _round(checkpoint: str, router: Router, seed: int) -> dict[str, float]:
    job = ServeJob(
        checkpoint=checkpoint,
        model_name="model",
        port=free_port(),
        replicas=2,
        cpus_per_replica=0.5,
        router=router,
        default_mode=ExactMode(),
        engine=EngineConfig(max_batch=8, max_context=1024, threads=1, device="cpu"),
    )
    url = start(job)
    # The page also counts earlier rounds.
    before = _counters()
    started = time.perf_counter()
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        seeds = range(seed * _CONVERSATIONS, (seed + 1) * _CONVERSATIONS)
        times = [
            seconds for run in pool.map(lambda own: _converse(url, own), seeds) for seconds in run
        ]
    total_s = time.perf_counter() - started
    time.sleep(_EXPORTED_S)
    queries, hits = (now - then for now, then in zip(_counters(), before, strict=True))
    serve.shutdown()
    return {
        "hit_share": hits / queries,
        "reply_s_median": statistics.median(times),
        "reply_s_p95": statistics.quantiles(times, n=20)[-1],
        "total_s": total_s,
    }


def _converse(url: str, seed: int) -> list[float]:
    """Seconds of each reply except the first, which cannot have been cached."""
    messages: list[dict[str, str]] = []
    times = []
    for problem in problems("test", _TURNS, seed):
        messages.append({"role": "user", "content": problem.question})
        body = {"model": "model", "messages": messages, "max_tokens": _NEW_TOKENS, "temperature": 0}
        started = time.perf_counter()
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            said = json.load(reply)["choices"][0]["message"]["content"]
        times.append(time.perf_counter() - started)
        messages.append({"role": "assistant", "content": said})
    return times[1:]


def _counters() -> tuple[float, float]:
    """Number of tokens looked up in the caches so far, and the number found."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return _sum(lines, "queries"), _sum(lines, "hits")


def _sum(lines: list[str], name: str) -> float:
    begin = f"ray_mars_prefix_cache_{name}_total{{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(begin))


if __name__ == "__main__":
    main()
