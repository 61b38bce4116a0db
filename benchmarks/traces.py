"""What a job's traces are like: `python benchmarks/traces.py jobs/NAME.toml > .../traces.json`.

Rates, peaks, token counts and shared prompts of every source as it is (seed 0), and how far the
totals of other seeds are from it. Any job with `[traces]` will do, of which nothing else is read.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from mars_ray.provenance import provenance
from mars_ray.simulator.config import TraceSource
from mars_ray.simulator.traces.load import load_trace
from mars_ray.simulator.traces.trace import Ints, Trace

_SEEDS = (1, 2, 3, 4)
# A replica that is ordered comes later than this: what varies faster must be carried by the fleet.
_WINDOW_S = 30.0


def main(job: str) -> None:
    """Print one JSON object, by the name of the trace."""
    given = tomllib.loads(Path(job).read_text())["traces"]
    sources = TypeAdapter(dict[str, TraceSource]).validate_python(given)
    rows = {name: _row(source) for name, source in sources.items()}
    result = {
        "window_s": _WINDOW_S,
        "seeds": list(_SEEDS),
        "sources": {name: source.model_dump(mode="json") for name, source in sources.items()},
        "traces": rows,
        "provenance": provenance(),
    }
    json.dump(result, sys.stdout, indent=1)
    print()


def _row(source: TraceSource) -> dict[str, Any]:
    trace = load_trace(source, 0)
    own = _measures(trace)
    others = [_measures(load_trace(source, seed)) for seed in _SEEDS]
    return own | {
        "seeds": {
            key: [float(other[key] / own[key]) for other in others]
            for key in ("requests", "peak_over_mean", "prompt_mean", "output_mean")
        }
    }


def _measures(trace: Trace) -> dict[str, float]:
    counts = np.histogram(trace.arrival_s, np.arange(0, trace.duration_s + _WINDOW_S, _WINDOW_S))[0]
    # The last window may be cut short.
    whole = counts[:-1]
    return {
        "requests": len(trace),
        "duration_s": trace.duration_s,
        "rate_rps": len(trace) / trace.duration_s,
        "peak_over_mean": float(whole.max() / whole.mean()),
        "deviation_over_mean": float(whole.std() / whole.mean()),
        **_tokens("prompt", trace.prompt_tokens),
        **_tokens("output", trace.output_tokens),
        "shared_share": float(trace.shared_tokens.sum() / trace.prompt_tokens.sum()),
        "sessions": len(np.unique(trace.sessions())),
    }


def _tokens(name: str, counts: Ints) -> dict[str, float]:
    return {f"{name}_mean": float(counts.mean()), f"{name}_p99": float(np.percentile(counts, 99))}


def table(result: dict[str, Any]) -> list[str]:
    """The lines for render.py: one trace a row, and how far other seeds are from seed 0."""
    lines = [
        "| trace | requests | hours | requests/s | busiest 30 s | prompt tokens (P99) "
        "| answer tokens (P99) | shared | other seeds: requests, prompt tokens, answer tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["traces"].items():
        seeds = [
            f"{min(row['seeds'][key]) - 1:+.0%} to {max(row['seeds'][key]) - 1:+.0%}"
            for key in ("requests", "prompt_mean", "output_mean")
        ]
        lines.append(
            f"| `{name}` | {row['requests']:,} | {row['duration_s'] / 3600:.1f} | "
            f"{row['rate_rps']:.1f} | {row['peak_over_mean']:.1f}x | "
            f"{row['prompt_mean']:,.0f} ({row['prompt_p99']:,.0f}) | "
            f"{row['output_mean']:,.0f} ({row['output_p99']:,.0f}) | "
            f"{row['shared_share']:.0%} | {', '.join(seeds)} |"
        )
    return [
        *lines,
        "",
        f"Seed 0; busiest {result['window_s']:g} s: its rate over the mean one; shared: of all "
        f"prompt tokens, with an earlier request; {len(result['seeds'])} other seeds against it. "
        f"Commit {result['provenance']['commit']}.",
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
