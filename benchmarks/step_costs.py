"""What a model's steps cost on this CPU: `python benchmarks/step_costs.py CHECKPOINT OUTPUT.json`.

With one thread and in processor seconds, so that other work on the machine does not count (what it
takes of caches and memory does). A long prompt is forwarded in chunks of each size; the first chunk
gives the seconds of so many rows, and later ones what each row takes more for every token before
it. Then sequences decode with that prompt in the cache, and alone.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Request
from mars_ray.provenance import provenance

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
BATCHES = (1, 4)
PROMPT, SHORT, DECODED, REPEATS = 512, 16, 48, 2


def main() -> None:
    """Measure, and write the medians."""
    checkpoint, output = sys.argv[1], Path(sys.argv[2])
    by_rows: dict[int, float] = {}
    pair_s: list[float] = []
    for rows in ROWS:
        engine = _engine(checkpoint, rows)
        runs = [list(_chunks(engine, rows)) for _ in range(REPEATS)]
        steps = [min(seconds) for seconds in zip(*runs, strict=True)]
        by_rows[rows] = statistics.median(steps[:2])
        if rows >= 32:
            slope = statistics.linear_regression(range(len(steps)), steps).slope
            pair_s.append(slope / rows**2)
    context_s = [_context_s(checkpoint, batch) for batch in BATCHES]
    result = {
        "checkpoint": Path(checkpoint).name,
        "threads": 1,
        "steps": [{"batch": 1, "positions": n, "seconds": s} for n, s in by_rows.items()],
        "prompt_attention_s": statistics.median(pair_s),
        "cache_token_s": statistics.median(context_s),
        "provenance": provenance(),
    }
    output.write_text(json.dumps(result, indent=1) + "\n")


def _engine(checkpoint: str, rows: int) -> Engine:
    config = EngineConfig(
        max_batch=max(BATCHES),
        max_context=PROMPT + DECODED,
        max_step_tokens=max(8, rows),
        prefix_cache=False,
        window_control=False,
        threads=1,
        device="cpu",
    )
    return load_engine(checkpoint, config)[0]


def _chunks(engine: Engine, rows: int) -> Iterator[float]:
    """Processor seconds of each chunk of one long prompt; small chunks only of its beginning."""
    length = min(PROMPT, 8 * rows)
    if rows < 8:
        # A step's rows are at least eight: several prompts of one row each instead.
        yield from (_decode_s(engine, rows, SHORT) for _ in range(2))
        return
    engine.submit(_request("prompt", length, 1))
    while engine.has_work:
        yield _step_s(engine)


def _context_s(checkpoint: str, batch: int) -> float:
    """Seconds that a step of decoding sequences takes for each token that they have cached."""
    engine = _engine(checkpoint, 128)
    long_s, short_s = (
        min(_decode_s(engine, batch, length) for _ in range(REPEATS)) for length in (PROMPT, SHORT)
    )
    return (long_s - short_s) / (batch * (PROMPT - SHORT))


def _decode_s(engine: Engine, batch: int, length: int) -> float:
    """Median of steps in which so many sequences decode behind prompts of this length."""
    for number in range(batch):
        engine.submit(_request(str(number), length, DECODED))
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {event.request_id for event in engine.step()}
    times = []
    while engine.running == batch:
        times.append(_step_s(engine))
    while engine.has_work:
        engine.step()
    return statistics.median(times)


def _step_s(engine: Engine) -> float:
    started = time.process_time()
    engine.step()
    return time.process_time() - started


def _request(name: str, length: int, tokens: int) -> Request:
    prompt = tuple(1000 + 7 * place % 997 for place in range(length))
    return Request(name, prompt, ExactMode(), Sampling(), tokens, frozenset())


if __name__ == "__main__":
    main()
