"""Which share of the time per token a full step should take: `python benchmarks/step_size.py DATA`.

For each trace, time per token and share: the smallest fixed fleet of the 7B model that keeps 99% of
the requests in time. Writes results/step_size.json. DATA holds the published traces; cells run in a
process per core, in several minutes.
"""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from mars_ray.autoscale.service_model import ServiceModel, load_service_model
from mars_ray.config.scaling import Slo
from mars_ray.provenance import provenance
from mars_ray.simulator.config import (
    AzureTrace,
    Cluster,
    FlashTrace,
    Lengths,
    MooncakeTrace,
    TraceSource,
)
from mars_ray.simulator.engine.run import EXACT, Fixture, simulate
from mars_ray.simulator.policies import Fixed
from mars_ray.simulator.traces.load import load_trace
from mars_ray.simulator.traces.trace import Trace

ROOT = Path(__file__).parents[1]
SHARES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 1.0, 1.2, 1.5, 2.0)
SLOS = {
    "6 ms": Slo(ttft_s=2.0, time_per_token_s=0.006),
    "15 ms": Slo(ttft_s=3.0, time_per_token_s=0.015),
    "30 ms": Slo(ttft_s=5.0, time_per_token_s=0.03),
}
MODES = ("exact", "verified")
MOST, KEPT = 40, 0.99


def sources(data: Path) -> dict[str, TraceSource]:
    """Twenty-five minutes of each trace."""
    azure = data / "trace_azure_llm_2023" / "AzureLLMInferenceTrace_code.csv"
    mooncake = data / "trace_mooncake_fast25" / "conversation_trace.jsonl.gz"
    return {
        "flash": FlashTrace(
            base_rps=8, peak_rps=24, lengths=Lengths(prompt_mean=1000, output_mean=500)
        ),
        "azure-code": AzureTrace(
            path=str(azure), rate_factor=10, spread_s=5, start_s=600, duration_s=1500
        ),
        "mooncake": MooncakeTrace(path=str(mooncake), rate_factor=3, duration_s=1500),
    }


def main() -> None:
    """Write the smallest fleets by cell and share."""
    data = Path(sys.argv[1])
    cells = list(product(sources(data), SLOS, MODES))
    with ProcessPoolExecutor() as pool:
        rows = [row for rows in pool.map(partial(_cell, data), cells) for row in rows]
    result = {"kept": KEPT, "most": MOST, "rows": rows, "provenance": provenance()}
    path = ROOT / "benchmarks" / "results" / "step_size.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


def _cell(data: Path, cell: tuple[str, str, str]) -> list[dict[str, Any]]:
    name, regime, mode = cell
    trace, model, slo = _trace(data, name), _model(), SLOS[regime]
    made: dict[int, dict[str, Any]] = {}
    rows = []
    for share in SHARES:
        size = _rows(model, share * slo.time_per_token_s)
        if size not in made:
            made[size] = _smallest(trace, replace(model, step_rows=size), mode, slo)
        facts = {"trace": name, "time_per_token": regime, "mode": mode, "share": share}
        rows.append(facts | {"rows": size} | made[size])
    return rows


@cache
def _trace(data: Path, name: str) -> Trace:
    return load_trace(sources(data)[name], seed=0)


@cache
def _model() -> ServiceModel:
    return load_service_model(ROOT / "jobs" / "models" / "7b-verified.json")


def _rows(model: ServiceModel, seconds: float) -> int:
    """The most rows whose step takes no longer; those of the shortest step if none is so short."""
    return max(n for n in range(8, 4096) if n == 200 or model.step_s(n) <= seconds)


def _smallest(trace: Trace, model: ServiceModel, mode: str, slo: Slo) -> dict[str, Any]:
    """The smallest fleet, None if even MOST replicas are too few, and its share in time."""
    levels = EXACT if mode == "exact" else model.levels[:1]
    cluster = Cluster(tick_s=60, step_tokens=model.step_rows)

    def attainment(replicas: int) -> float:
        fixture = Fixture(trace, model, cluster, levels, 1.0, replicas, replicas, seed=0)
        return float(simulate(fixture, Fixed(replicas)).within(slo).mean())

    low, high, best = 1, MOST, attainment(MOST)
    if best < KEPT:
        return {"replicas": None, "attainment": best}
    while low < high:
        middle = (low + high) // 2
        share = attainment(middle)
        low, high, best = (low, middle, share) if share >= KEPT else (middle + 1, high, best)
    return {"replicas": low, "attainment": best}


if __name__ == "__main__":
    main()
