"""The live service under load: `python benchmarks/serve_load.py CHECKPOINT`, a quarter of an hour.

Without a checkpoint, `--random-weights qwen2.5-0.5b` serves a model of that shape.

One run measures, in turn on the same checkpoint:

- the service, behind Serve's own proxy and behind HAProxy, and the bare engine at the same batch
- a first token with and without HTTP and Serve
- both services and `vllm serve`

Then AIPerf (benchmarks/install_load_tool.sh) sends load at rising rates to one and two replicas
behind Serve's proxy.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

from compare_decoders import random_checkpoint
from lib.load_client import Client, Load, load
from lib.load_servers import mars_command, started, vllm_command

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.inputs import PresetName
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.data.chat import encode_prompt
from mars_ray.data.corpus import problems
from mars_ray.data.sources import Message
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Request
from mars_ray.model.load import stop_ids
from mars_ray.provenance import provenance
from mars_ray.serve.protocol import Envelope, GenerationRequest, Turn
from mars_ray.serve.replica.llm_server import LLMServer

BATCH = 8
# Enough clients that the batch is always full.
CLIENTS = 2 * BATCH
# Another seed than training's, evaluation's and the demo question's.
PROMPT_SEED = 77
# Suffixes of rows of the result, by the proxy in front.
FRONTS = {"": (), ", HAProxy": ("--haproxy",)}
MODES: dict[str, Mode] = {"exact": ExactMode(), "verified": VerifiedMode()}


def main() -> None:
    """Run all measurements, in the order in which the servers are needed."""
    asked = _arguments()
    with ExitStack() as stack:
        if asked.random_weights:
            asked.checkpoint = stack.enter_context(random_checkpoint(asked.random_weights))
        result = _measured(asked)
    asked.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def _measured(asked: argparse.Namespace) -> dict[str, Any]:
    questions = [problem.question for problem in problems("test", asked.prompts, PROMPT_SEED)]
    engine = EngineConfig(max_batch=BATCH, max_context=256, threads=1, device="cpu")
    result: dict[str, Any] = {
        "batch": BATCH,
        "clients": CLIENTS,
        "rounds": asked.rounds,
        "prompts": asked.prompts,
        "new_tokens": asked.new_tokens,
        "rate_s": asked.rate_s,
        "model": asked.random_weights or "the demo's",
    }
    with ExitStack() as stack:
        peer = None
        if asked.vllm:
            # vLLM takes the longest to start.
            command = vllm_command(asked.vllm, asked.checkpoint, BATCH)
            peer = stack.enter_context(started(command))
        urls = {}
        for front, options in FRONTS.items():
            command = mars_command(asked.checkpoint, BATCH, 1, *options)
            urls[front] = stack.enter_context(started(command)).wait()
        peer_url = peer and peer.wait()
        # Random weights write bytes that are no text, so there is no first text to wait for.
        if not asked.random_weights:
            result["first_tokens"] = _first_tokens(urls, asked.checkpoint, engine, questions)
        result["engine"] = _beside_engine(urls, asked, engine, questions)
        if peer_url:
            result["vllm"] = asyncio.run(_beside_vllm(urls, peer_url, asked, questions))
    if asked.aiperf:
        result["rates"] = []
        for replicas in (1, 2):
            with started(mars_command(asked.checkpoint, BATCH, replicas)) as server:
                rows = _rates(server.wait(), asked, questions)
                result["rates"] += [{"replicas": replicas} | row for row in rows]
    return result | {"provenance": provenance()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("checkpoint", nargs="?")
    model.add_argument(
        "--random-weights",
        choices=get_args(PresetName),
        help="a preset's name: its shape is served",
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/serve_load.json"))
    parser.add_argument("--aiperf", help="the program; without it no rising rates")
    parser.add_argument("--vllm", help="the Python of vLLM's environment; without it no vLLM")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--rates", type=float, nargs="+", default=[4, 12, 24])
    parser.add_argument("--rate-s", type=float, default=8, help="seconds at each rate")
    return parser.parse_args()


def _body(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {
        "model": "mars",
        "messages": messages,
        "temperature": 0,
    } | fields


def _first_tokens(
    urls: dict[str, str], checkpoint: str, config: EngineConfig, questions: list[str]
) -> dict[str, dict[str, float]]:
    """Milliseconds to the first text on an idle system, over HTTP and in this process in turn."""
    job = ServeJob(checkpoint=checkpoint, engine=config, limits=Limits())
    engine, tokenizer = load_engine(checkpoint, config)
    text_engine = LLMServer(AsyncEngine(engine), tokenizer, job)
    text_engine.start()

    async def inside(number: int, question: str) -> float:
        prompt = ((Turn("user", question),),)
        call = GenerationRequest(f"first-{number}", prompt, ExactMode(), Sampling(), 4, 4)
        begin = time.perf_counter()
        first = None
        async for piece in text_engine.generate(call):
            if isinstance(piece, Envelope):
                first = first or time.perf_counter() - begin
        assert first
        return first

    async def all_in_turn() -> tuple[dict[str, list[float]], list[float]]:
        clients = {front: Client(url) for front, url in urls.items()}
        over_http: dict[str, list[float]] = {front: [] for front in urls}
        in_process = []
        for number, question in enumerate([questions[0], *questions]):
            for front, client in clients.items():
                told = await client.chat(_body(question, mode="exact", max_tokens=4))
                over_http[front].append(told.first_s)
            in_process.append(await inside(number, question))
        for client in clients.values():
            client.close()
        return {front: seconds[1:] for front, seconds in over_http.items()}, in_process[1:]

    over_http, in_process = asyncio.run(all_in_turn())
    text_engine.stop()
    return {front: _added(seconds, in_process) for front, seconds in over_http.items()}


def _added(over_http: list[float], in_process: list[float]) -> dict[str, float]:
    added = [1e3 * (a - b) for a, b in zip(over_http, in_process, strict=True)]
    return {
        "service_ms": 1e3 * statistics.median(over_http),
        "engine_ms": 1e3 * statistics.median(in_process),
        "added_ms_p50": statistics.median(added),
        "added_ms_p90": statistics.quantiles(added, n=10)[-1],
    }


def _beside_engine(
    urls: dict[str, str], asked: argparse.Namespace, config: EngineConfig, questions: list[str]
) -> dict[str, Any]:
    """Tokens/s of the service over those of the bare engine, round by round, for every mode."""
    engine, tokenizer = load_engine(asked.checkpoint, config)
    prompts = [tuple(encode_prompt([Message("user", text)], tokenizer)) for text in questions]
    rows = {}
    for name, mode in MODES.items():
        bodies = [_body(question, mode=name, max_tokens=asked.new_tokens) for question in questions]
        bare: list[float] = []
        served: dict[str, list[Load]] = {front: [] for front in urls}
        for _ in range(1 + asked.rounds):
            bare.append(_bare(engine, prompts, mode, asked.new_tokens))
            for front, url in urls.items():
                served[front].append(asyncio.run(load(url, bodies, CLIENTS)))
        for front, loads in served.items():
            # The first round only warms up.
            rows[name + front] = _share(loads[1:], bare[1:])
    return rows


def _share(loads: list[Load], bare: list[float]) -> dict[str, float]:
    rates = [one.tokens / one.seconds for one in loads]
    return {
        "engine_tokens_per_s": statistics.median(bare),
        "service_tokens_per_s": statistics.median(rates),
        "share": statistics.median(a / b for a, b in zip(rates, bare, strict=True)),
        "tokens_per_chunk": loads[0].tokens / loads[0].figures()["chunks"],
    }


def _bare(engine: Engine, prompts: list[tuple[int, ...]], mode: Mode, new_tokens: int) -> float:
    """Tokens per second of the bare engine."""
    stops = frozenset(stop_ids(engine.model))
    requests = [
        Request(str(number), prompt, mode, Sampling(), new_tokens, stops)
        for number, prompt in enumerate(prompts)
    ]
    begin = time.perf_counter()
    done = generate_all(engine, requests)
    return sum(len(each.tokens) for each in done) / (time.perf_counter() - begin)


async def _beside_vllm(
    urls: dict[str, str], peer: str, asked: argparse.Namespace, questions: list[str]
) -> list[dict[str, Any]]:
    """Figures of all services at several numbers of clients, and the ratios of each round."""
    most = {"max_tokens": asked.new_tokens}
    asks: dict[str, Callable[[int], Any]] = {"vllm": partial(_load, peer, questions, **most)}
    for (front, url), name in product(urls.items(), MODES):
        asks[f"mars-ray {name}{front}"] = partial(_load, url, questions, **most, mode=name)
    rows = []
    for clients in (1, BATCH, CLIENTS):
        figures: dict[str, list[dict[str, float]]] = {name: [] for name in asks}
        for round_ in range(1 + asked.rounds):
            for name, ask in asks.items():
                got = (await ask(clients)).figures()
                figures[name] += [got] * bool(round_)
        for name, got in figures.items():
            own, theirs = [[one["tokens_per_s"] for one in figures[n]] for n in (name, "vllm")]
            ratio = statistics.median(a / b for a, b in zip(own, theirs, strict=True))
            medians = {key: statistics.median(one[key] for one in got) for key in got[0]}
            rows.append({"clients": clients, "service": name, "times_vllm": ratio} | medians)
    return rows


async def _load(url: str, questions: list[str], clients: int, **fields: Any) -> Load:
    # A single client needs only a few answers.
    some = questions if clients > 1 else questions[: len(questions) // 4]
    return await load(url, [_body(question, **fields) for question in some], clients)


def _rates(url: str, asked: argparse.Namespace, questions: list[str]) -> list[dict[str, Any]]:
    """AIPerf's figures at every rate."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        prompts = Path(directory) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"text": q}) + "\n" for q in questions))
        for rate in asked.rates:
            out = Path(directory) / f"rate-{rate:g}"
            count = max(10, round(rate * asked.rate_s))
            command = [asked.aiperf, "profile", "--model", "mars", "--url", url]
            command += ["--endpoint-type", "chat", "--streaming", "--request-rate", f"{rate:g}"]
            command += ["--request-count", str(count), "--input-file", str(prompts)]
            command += ["--custom-dataset-type", "single_turn", "--use-server-token-count"]
            command += ["--extra-inputs", "temperature:0", f"max_tokens:{asked.new_tokens}"]
            command += ["--tokenizer", asked.checkpoint, "--artifact-dir", str(out)]
            command += ["--ui", "none", "--workers-max", "2", "--record-processors", "1"]
            command += ["--no-server-metrics", "--no-gpu-telemetry"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if done.returncode:
                raise RuntimeError(f"AIPerf failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
            told = json.loads((out / "profile_export_aiperf.json").read_text())
            rows.append({"rate": rate} | _aiperf_row(told))
    return rows


def _aiperf_row(told: dict[str, Any]) -> dict[str, Any]:
    row = {
        "answers": told["request_count"]["avg"],
        "errors": told.get("error_request_count", {}).get("avg", 0),
        "answers_per_s": told["request_throughput"]["avg"],
        "tokens_per_s": told["output_token_throughput"]["avg"],
    }
    for name, key in (
        ("first_token_ms", "time_to_first_token"),
        ("per_token_ms", "inter_token_latency"),
        ("answer_ms", "request_latency"),
    ):
        row |= {f"{name}_{point}": told[key][point] for point in ("p50", "p90", "p99")}
    return row


if __name__ == "__main__":
    main()
