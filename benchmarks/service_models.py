"""The service models of jobs/models/, and two results that they are made from.

    python benchmarks/service_models.py                             writes jobs/models/
    python benchmarks/service_models.py spread IDENTITY.json OUTPUT.json
    python benchmarks/service_models.py steps CHECKPOINT OUTPUT.json

The models are made from committed results and published figures; their provenance says which.

spread: how much replies differ in T/F, from the answers that identity.py keeps beside its result.
steps:  what a model's steps cost on this CPU. With one thread and in processor seconds, so that
        other work on the machine does not count (what it takes of caches and memory does). A long
        prompt is forwarded in chunks of each size: the first gives the seconds of so many rows,
        later ones what each row takes more for every token before it. Then sequences decode with
        that prompt in the cache, and alone.
"""

import json
import statistics
import sys
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, Literal

from mars_ray.autoscale.service_model import (
    Level,
    ServiceModel,
    acceptance_rate,
    confidence_level,
    levels_of,
    verified_level,
)
from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.core.frontier import Frontier
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Request
from mars_ray.errors import ConfigError
from mars_ray.provenance import provenance

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

_DEPTH = 4  # of SmolLM2's adapter
_BENCHES = ("decode_demo", "decode_demo_large")

# Qwen2.5-7B on an H200 in bfloat16: 15.2 GB of weights at 85% of 4.8 TB/s, a knee at 200 rows,
# 1 ms for launching, 57 kB of KV cache a token, 110 GB for it. Its card names a context of 131,072.
_BYTES_PER_S = 0.85 * 4.8e12
_WEIGHTS = 7.6e9
_READ_S, _KNEE_ROWS, _LAUNCH_S = 2 * _WEIGHTS / _BYTES_PER_S, 200, 1e-3
_CACHE_BYTES, _CACHE_ROOM = 57_344, 110e9
_CONTEXT = 131_072
# Scores and sums of values, 2 FLOP each, of 28 layers of 28 heads of 128, at the speed of the rest
# of a row, which has 2 FLOP a weight.
_ATTENTION_S = 4 * 28 * 28 * 128 * (_READ_S / _KNEE_ROWS) / (2 * _WEIGHTS)


_MODE = "verified 1 G=5, with adapter, batch 16"  # of the replies whose T/F is spread
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_BATCHES = (1, 4)
_PROMPT, _SHORT, _DECODED, _REPEATS = 512, 16, 48, 2

# Tokens of the shortest reply whose T/F counts for the spread, and quantiles of it.
_LEAST_REPLY, _QUANTILES = 16, 20


def measured_steps(bench: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """(rows, seconds) of steps in a `compare_decoders.py` result, the engine's own work included.

    They are the result's `steps` if it has any, else the mean steps of mars-ray's own decoders.
    Raises ConfigError when it has neither at two numbers of rows.
    """
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for step in bench["steps"]:
        seconds[step["batch"] * step["positions"]].append(step["seconds"])
    if not bench["steps"]:
        for case in bench["cases"]:
            if case["label"].startswith("mars-ray "):
                step_s = case["ms_per_step"] / 1e3
                rows = case["tokens_per_s"] * step_s * case["positions_per_token"]
                seconds[max(1, round(rows))].append(step_s)
    if len(seconds) < 2:
        raise ConfigError("the benchmark has no steps; run it with step_positions")
    return tuple((rows, median(seconds[rows])) for rows in sorted(seconds))


def data_sheet_steps(
    read_s: float, row_s: float, launch_s: float = 0.0
) -> tuple[tuple[int, float], ...]:
    """max(read_s, row_s * rows) + launch_s as a table: reading the weights, a row's arithmetic."""
    corner = max(2, round(read_s / row_s))
    return tuple((n, max(read_s, row_s * n) + launch_s) for n in (1, corner, 8 * corner))


def spread_of(tokens: Sequence[int], forwards: Sequence[int]) -> tuple[float, ...]:
    """Quantiles, over tokens, of what masks bring single replies: tokens beyond one a forward, as
    multiples of what all forwards together have. The mean over forwards is 1.

    Short replies are left out: their T/F is mostly chance.
    """
    pairs = [(t, f) for t, f in zip(tokens, forwards, strict=True) if t >= _LEAST_REPLY]
    more = sum(t for t, _ in pairs) / sum(f for _, f in pairs) - 1
    gains = sorted(((t / f - 1) / more, t) for t, f in pairs)
    reached = list(accumulate(t for _, t in gains))
    marks = [(i + 0.5) / _QUANTILES * reached[-1] for i in range(_QUANTILES)]
    return tuple(round(gains[bisect_left(reached, mark)][0], 3) for mark in marks)


def demo() -> ServiceModel:
    """The demo checkpoint on one CPU core."""
    benches = [json.loads((RESULTS / f"{n}.json").read_text()) for n in _BENCHES]
    frontier = Frontier.from_json((RESULTS / "demo.json").read_text())
    steps = dict(measured_steps({"steps": [], "cases": [c for b in benches for c in b["cases"]]}))
    return ServiceModel(
        "demo checkpoint, one CPU core",
        tuple(sorted(steps.items())),
        levels_of(frontier, "verified", 8),
        max_batch=64,
        provenance={"from": [f"{name}.json" for name in (*_BENCHES, "demo")]},
    )


def gsm8k() -> ServiceModel:
    """The model of jobs/train-gsm8k.toml on one CPU core: real text, so drafts are often wrong.

    It is too small to do arithmetic, so its accuracy is low even before a lower threshold costs
    any of it.
    """
    bench = json.loads((RESULTS / "decode_gsm8k.json").read_text())
    frontier = Frontier.from_json((RESULTS / "gsm8k_frontier.json").read_text())
    return ServiceModel(
        "a small model trained on GSM8K, one CPU core",
        measured_steps(bench),
        levels_of(frontier, "verified", 4),
        max_batch=4,
        provenance={"from": ["decode_gsm8k.json", "gsm8k_frontier.json"]},
    )


def paper() -> ServiceModel:
    """The paper's `confidence` on GSM8K: 73.2% with one token per forward."""
    points = ((0.95, 71.0, 1.79), (0.9, 70.3, 1.96), (0.8, 67.7, 2.19))
    lower = [
        confidence_level(t, round(73.2 - a, 1), [acceptance_rate("confidence", f, 4)] * 4)
        for t, a, f in points
    ]
    levels = (Level(1.0, 0.0, ()), *lower)
    source = "arXiv 2604.07023: Qwen2.5-7B, B = 4, GSM8K"
    return _h200("7B assumed, confidence, H200", "confidence", levels, source)


def verified() -> ServiceModel:
    """The same device with `verified`: T/F of a small model on real text.

    No measurement exists of the accuracy that a relaxed threshold costs a 7B model. We assume the
    loss of the paper's rule at the same rise of the negative log-likelihood: 5.5 points at 8.0%.
    """
    lossless, curve = 0.448, ((0.3, 0.468, 1.61), (0.1, 0.507, 1.70), (0.03, 0.616, 1.81))
    points = [(t, 5.5 * (nll / lossless - 1) / 0.080, f) for t, nll, f in curve]
    levels = tuple(
        verified_level(t, round(lost, 1), [acceptance_rate("verified", f, 4)] * 4)
        for t, lost, f in [(1.0, 0.0, 1.52), *points]
    )
    source = (
        "T/F of a small model on real text, points assumed by likelihood (docs/inside/simulator.md)"
    )
    return _h200("7B assumed, verified, H200", "verified", levels, source)


def _h200(
    name: str, mode: Literal["verified", "confidence"], levels: tuple[Level, ...], source: str
) -> ServiceModel:
    return ServiceModel(
        name,
        data_sheet_steps(_READ_S, _READ_S / _KNEE_ROWS, _LAUNCH_S),
        levels,
        max_batch=128,
        mode=mode,
        cache_token_s=_CACHE_BYTES / _BYTES_PER_S,
        prompt_attention_s=_ATTENTION_S,
        cache_tokens=int(_CACHE_ROOM / _CACHE_BYTES),
        max_model_len=_CONTEXT,
        spread=_spread(),
        provenance={
            "levels": source,
            "steps": "data sheet: 4.8 TB/s at 85%, knee at 200 rows; attention by arithmetic",
            "spread": "assumed as SmolLM2's (smollm2_spread.json)",
        },
    )


def smollm2() -> ServiceModel:
    """SmolLM2-135M with its draft adapter on one CPU core, all measured.

    The points of a level are tokens in a hundred that are not what the original would have said
    there: no task's accuracy, which this model hardly has, but the distance from the original.
    """
    costs = _result("smollm2_steps")
    points = {p["threshold"]: p for p in _thresholds()}
    levels = tuple(
        verified_level(
            threshold,
            round(100 * (1 - points[threshold]["agreement"]), 1),
            [acceptance_rate("verified", points[threshold]["tokens_per_forward"], _DEPTH)] * _DEPTH,
        )
        for threshold in sorted(points, reverse=True)
    )
    return ServiceModel(
        "SmolLM2-135M with its adapter, one CPU core",
        measured_steps(costs),
        levels,
        max_batch=16,
        cache_token_s=costs["cache_token_s"],
        prompt_attention_s=costs["prompt_attention_s"],
        max_model_len=8192,
        spread=_spread(),
        provenance={
            "from": ["smollm2_steps.json", "smollm2_thresholds.json", "smollm2_spread.json"],
            "points": "tokens in a hundred that the original would not have said",
        },
    )


def _thresholds() -> list[dict[str, Any]]:
    rows = _result("smollm2_thresholds")["points"]
    return [row | {"threshold": t} for row in rows if (t := row["mode"].get("threshold"))]


def half_billion() -> ServiceModel:
    """The shape of Qwen2.5-0.5B with random weights on two CPU cores: steps are measured, T/F are
    those of SmolLM2's adapter."""
    measured = smollm2()
    return replace(
        measured,
        name="0.5B shape, two CPU cores, T/F of SmolLM2's adapter",
        seconds_at=measured_steps(_result("decode_0_5b")),
        cache_token_s=0.0,
        prompt_attention_s=0.0,
        max_model_len=32_768,
        provenance={
            "steps": "decode_0_5b.json, rows only",
            "levels": "assumed as SmolLM2's with its adapter",
        },
    )


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _spread() -> tuple[float, ...]:
    return tuple(_result("smollm2_spread")["spread"])


def write_spread(identity: Path, output: Path) -> None:
    """Tokens and forwards of each reply, and the quantiles of what masks brought."""
    result = json.loads(identity.read_text())
    answers: list[dict[str, Any]] = json.loads(
        (identity.with_suffix(".answers") / f"float32 {_MODE}.json").read_text()
    )
    tokens = [len(answer["tokens"]) for answer in answers]
    forwards = [answer["forwards"] for answer in answers]
    spread = {
        "mode": _MODE,
        "replies": len(answers),
        "tokens": tokens,
        "forwards": forwards,
        "spread": spread_of(tokens, forwards),
        "provenance": result["provenance"],
    }
    output.write_text(json.dumps(spread) + "\n")


def measure_steps(checkpoint: str, output: Path) -> None:
    """Measure, and write the medians."""
    by_rows: dict[int, float] = {}
    pair_s: list[float] = []
    for rows in _ROWS:
        engine = _engine(checkpoint, rows)
        runs = [list(_chunks(engine, rows)) for _ in range(_REPEATS)]
        steps = [min(seconds) for seconds in zip(*runs, strict=True)]
        by_rows[rows] = median(steps[:2])
        if rows >= 32:
            slope = statistics.linear_regression(range(len(steps)), steps).slope
            pair_s.append(slope / rows**2)
    context_s = [_context_s(checkpoint, batch) for batch in _BATCHES]
    result = {
        "checkpoint": Path(checkpoint).name,
        "threads": 1,
        "steps": [{"batch": 1, "positions": n, "seconds": s} for n, s in by_rows.items()],
        "prompt_attention_s": median(pair_s),
        "cache_token_s": median(context_s),
        "provenance": provenance(),
    }
    output.write_text(json.dumps(result, indent=1) + "\n")


def _engine(checkpoint: str, rows: int) -> Engine:
    config = EngineConfig(
        max_batch=max(_BATCHES),
        max_context=_PROMPT + _DECODED,
        max_step_tokens=max(8, rows),
        prefix_cache=False,
        window_control=False,
        threads=1,
        device="cpu",
    )
    return load_engine(checkpoint, config)[0]


def _chunks(engine: Engine, rows: int) -> Iterator[float]:
    """Processor seconds of each chunk of one long prompt; small chunks only of its beginning."""
    length = min(_PROMPT, 8 * rows)
    if rows < 8:
        # A step's rows are at least eight: several prompts of one row each instead.
        yield from (_decode_s(engine, rows, _SHORT) for _ in range(2))
        return
    engine.submit(_request("prompt", length, 1))
    while engine.has_work:
        yield _step_s(engine)


def _context_s(checkpoint: str, batch: int) -> float:
    """Seconds that a step of decoding sequences takes for each token that they have cached."""
    engine = _engine(checkpoint, 128)
    long_s, short_s = (
        min(_decode_s(engine, batch, length) for _ in range(_REPEATS))
        for length in (_PROMPT, _SHORT)
    )
    return (long_s - short_s) / (batch * (_PROMPT - _SHORT))


def _decode_s(engine: Engine, batch: int, length: int) -> float:
    """Median of steps in which so many sequences decode behind prompts of this length."""
    for number in range(batch):
        engine.submit(_request(str(number), length, _DECODED))
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {event.request_id for event in engine.step()}
    times = []
    while engine.running == batch:
        times.append(_step_s(engine))
    while engine.has_work:
        engine.step()
    return median(times)


def _step_s(engine: Engine) -> float:
    started = time.process_time()
    engine.step()
    return time.process_time() - started


def _request(name: str, length: int, tokens: int) -> Request:
    prompt = tuple(1000 + 7 * place % 997 for place in range(length))
    return Request(name, prompt, ExactMode(), Sampling(), tokens, frozenset())


def main() -> None:
    """Write what is asked for."""
    match sys.argv[1:]:
        case ["spread", identity, output]:
            write_spread(Path(identity), Path(output))
        case ["steps", checkpoint, output]:
            measure_steps(checkpoint, Path(output))
        case []:
            write_models()
        case _:
            sys.exit(__doc__)


def write_models() -> None:
    """One file per model."""
    folder = ROOT / "jobs" / "models"
    folder.mkdir(exist_ok=True)
    models = {
        "demo-cpu": demo(),
        "gsm8k-cpu": gsm8k(),
        "7b-paper": paper(),
        "7b-verified": verified(),
        "smollm2-cpu": smollm2(),
        "0.5b-cpu": half_billion(),
    }
    for name, model in models.items():
        model.save(folder / f"{name}.json")


if __name__ == "__main__":
    main()
