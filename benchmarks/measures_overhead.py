"""The cost of live measures: `python benchmarks/measures_overhead.py CHECKPOINT [ROUNDS]`.

Measures their share of the engine's time, which includes the cost of reading the clock, and prints
one JSON object. Running with and without them in turn cannot resolve a percent on a machine whose
speed varies by more.
"""

import json
import statistics
import sys
import time
from typing import Any

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ConfidenceMode, Mode, VerifiedMode
from mars_ray.data.chat import Message, encode_prompt
from mars_ray.data.corpus import problems
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Request
from mars_ray.decode.stats import LiveMeasures
from mars_ray.model.stop import stop_ids
from mars_ray.provenance import provenance

_BATCHES = (1, 8, 16)
_MODES: dict[str, Mode] = {"verified": VerifiedMode(), "confidence": ConfidenceMode()}


class _Timed(LiveMeasures):
    """Live measures that sum the time they take."""

    seconds = 0.0

    def observe(
        self, sequence: Any, plan: Any, rows: Any, outcome: int, proposals: Any, tokens: Any
    ) -> None:
        """Observe as the base class does, timed."""
        started = time.perf_counter()
        super().observe(sequence, plan, rows, outcome, proposals, tokens)
        self.seconds += time.perf_counter() - started


def main() -> None:
    """Measure every mode and batch size."""
    checkpoint, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10
    config = EngineConfig(
        max_batch=max(_BATCHES), max_context=256, threads=1, device="cpu", window_control=False
    )
    engine, tokenizer = load_engine(checkpoint, config)
    asked = problems("test", max(_BATCHES), 77)
    prompts = [tuple(encode_prompt([Message("user", p.question)], tokenizer)) for p in asked]
    stops = frozenset(stop_ids(engine.model))
    cases = {}
    for name, mode in _MODES.items():
        for batch in _BATCHES:
            requests = [
                Request(str(i), prompt, mode, Sampling(), 128, stops)
                for i, prompt in enumerate(prompts[:batch])
            ]
            shares = [_share(engine, requests) for _ in range(rounds)]
            cases[f"{name}, batch {batch}"] = statistics.median(shares)
    print(json.dumps({"share": cases, "rounds": rounds, "provenance": provenance()}, indent=1))


def _share(engine: Engine, requests: list[Request]) -> float:
    engine.measures = measures = _Timed()
    started = time.perf_counter()
    generate_all(engine, requests)
    return measures.seconds / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
