"""What sampling adds to a step: `python benchmarks/sampling.py CHECKPOINT OUTPUT.json`.

Eight sequences decode plainly (`exact`) in bfloat16, in turn greedily and as each other request
asks; a round times every way once. The checkpoint is measured, and a model with the shape of
Qwen2.5-0.5B (151,936 tokens): random weights, with a final norm that spreads the logits like a
trained model's. With one thread a step tells what the sampling of a row costs, with two what a
service's step is. Run again, it goes on where it was.
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from compare_decoders import random_checkpoint
from safetensors.torch import load_file, save_file

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Grammar, Request
from mars_ray.decode.structured_output import Grammars
from mars_ray.model.load import load_tokenizer, stop_ids
from mars_ray.provenance import provenance

BATCH, PROMPT = 8, 32
# Steps of one measurement, behind one that is not counted.
STEPS = 15
# The standard deviation of logits becomes about 4.
SPREAD = 6.0
SCHEMA = """start: %json {"type": "object", "properties": {
"text": {"type": "string", "minLength": 400}}, "required": ["text"]}"""


@dataclass(frozen=True, slots=True)
class Way:
    """How tokens are chosen."""

    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int | None = None
    is_json: bool = False


WAYS = {
    "greedy": Way(),
    "T=1": Way(Sampling(temperature=1.0)),
    "T=0.7, top_p=0.9": Way(Sampling(temperature=0.7, top_p=0.9)),
    "T=0.7, top_k=20": Way(Sampling(temperature=0.7, top_k=20)),
    "T=0.7, min_p=0.05": Way(Sampling(temperature=0.7, min_p=0.05)),
    "json_schema": Way(is_json=True),
    "penalties": Way(Sampling(presence_penalty=0.5, frequency_penalty=0.5)),
    "logprobs=5": Way(logprobs=5),
}


def main() -> None:
    """Measure both models with one thread and with two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with ExitStack() as stack:
        wide = stack.enter_context(random_checkpoint("qwen2.5-0.5b"))
        _spread_logits(Path(wide) / "model.safetensors")
        result: dict[str, Any] = {"batch": BATCH, "dtype": "bfloat16", "runs": []}
        if asked.output.exists():
            result = json.loads(asked.output.read_text())
        known = {(run["model"], run["threads"]) for run in result["runs"]}
        models = {Path(asked.checkpoint).name: asked.checkpoint, "wide": wide}
        for name, threads in product(models, (1, 2)):
            if (name, threads) in known:
                continue
            # A process each: the pool of the compiled step is made once.
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                run = pool.submit(measured, models[name], threads, asked.rounds).result()
            result["runs"].append({"model": name, "threads": threads} | run)
            result["provenance"] = provenance()
            asked.output.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result["runs"][-1]), flush=True)


def measured(checkpoint: str, threads: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step in each way: the median of each round."""
    config = EngineConfig(
        max_batch=BATCH, max_context=128, threads=threads, device="cpu", dtype="bfloat16"
    )
    engine = load_engine(checkpoint, config)[0]
    vocabulary = engine.model.config.vocab_size
    grammar = Grammars(
        load_tokenizer(checkpoint), vocabulary, sorted(stop_ids(engine.model))
    ).compiled(SCHEMA, "schema")
    step_ms: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            step_ms[name].append(1000 * _step_s(engine, way, grammar))
    return {"vocabulary": vocabulary, "step_ms": step_ms}


def _step_s(engine: Engine, way: Way, grammar: Grammar) -> float:
    """The median of steps in which all sequences decode."""
    for number in range(BATCH):
        engine.submit(_request(number, way, grammar))
    begun: set[str] = set()
    while len(begun) < BATCH:
        begun |= {event.request_id for event in engine.step()}
    engine.step()
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    while engine.has_work:
        engine.step()
    return statistics.median(times)


def _request(number: int, way: Way, grammar: Grammar) -> Request:
    prompt = tuple(1000 + (7 * place + 31 * number) % 997 for place in range(PROMPT))
    sampling = way.sampling.model_copy(update={"seed": number})
    asked_grammar = grammar if way.is_json else None
    # No stop token: as many sequences decode in every step that is timed.
    tokens = STEPS + BATCH + 4
    return Request(
        str(number),
        prompt,
        ExactMode(),
        sampling,
        tokens,
        frozenset(),
        logprobs=way.logprobs,
        grammar=asked_grammar,
    )


def _spread_logits(file: Path) -> None:
    weights = load_file(file)
    weights["model.norm.weight"] *= SPREAD
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as written:
        save_file(weights, written.name, metadata={"format": "pt"})
        Path(written.name).replace(file)


if __name__ == "__main__":
    main()
