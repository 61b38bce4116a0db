"""The simulator's speed: `python benchmarks/simulator_speed.py > .../simulator_speed.json`.

Measures processor seconds, so that other load on the machine does not count, after compilation.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from mars_ray.autoscale.service_model import ServiceModel, load_service_model
from mars_ray.config.scaling import ScalingConfig
from mars_ray.provenance import provenance
from mars_ray.simulator.config import Cluster, Lengths, SineTrace
from mars_ray.simulator.engine.run import Deciding, Fixture, Policy, simulate
from mars_ray.simulator.policies import Fixed
from mars_ray.simulator.traces.load import load_trace

MODEL = Path(__file__).parents[1] / "jobs" / "models" / "7b-paper.json"
# Requests per second of a replica with half of its places taken.
_PER_REPLICA = 12.0
_CASES = (("fixed", 10, 1.0), ("mars", 10, 1.0), ("fixed", 100, 1.0), ("fixed", 1000, 5.0))


def main() -> None:
    """Print one row per case: policy, replicas, seconds between ticks."""
    model = load_service_model(MODEL)
    _case(model, "fixed", 2, 1.0)  # first call compiles
    rows = [_case(model, *case) for case in _CASES]
    json.dump({"cases": rows, "provenance": provenance()}, sys.stdout, indent=1)
    print()


def _case(model: ServiceModel, name: str, replicas: int, tick_s: float) -> dict[str, Any]:
    rate = replicas * _PER_REPLICA
    source = SineTrace(
        low_rps=0.5 * rate,
        high_rps=rate,
        period_s=600,
        duration_s=600,
        lengths=Lengths(prompt_mean=500, output_mean=300),
    )
    trace = load_trace(source, seed=0)
    cluster = Cluster(tick_s=tick_s)
    fixture = Fixture(trace, model, cluster, model.levels, 1.0, replicas, replicas, seed=0)
    config = ScalingConfig(min_replicas=replicas, max_replicas=replicas)
    policy: Policy = Fixed(replicas) if name == "fixed" else Deciding(config, model)
    started = time.process_time()
    outcome = simulate(fixture, policy)
    seconds = time.process_time() - started
    return {
        "policy": name,
        "replicas": replicas,
        "tick_s": tick_s,
        "requests": len(trace),
        "simulated_s": outcome.end_s,
        "cpu_s": seconds,
        "requests_per_cpu_s": len(trace) / seconds,
        "mean_outstanding": float(outcome.timeline.outstanding.mean() / replicas),
    }


if __name__ == "__main__":
    main()
