"""Compares scaling policies in cells of a trace, a regime and a cold start.

    python benchmarks/compare_policies.py JOB.toml --output DIR [KEY=VALUE ...]

with a job of `benchmarks/policies/`: as `mars-ray simulate`, with policies of other systems,
settings that are tuned on the other traces, the best fixed fleets known in hindsight, and a lower
bound (docs/inside/simulator.md). It writes `report.html` and `result.json`; what is finished stays
in DIR, and the same command goes on there.
"""

import argparse
import json
from pathlib import Path

from policies.comparison import run_simulations
from policies.job import KINDS, ComparisonJob
from policies.page import write_report
from policies.printed import print_comparison
from rich.console import Console

from mars_ray.config.load import load_job


def main() -> None:
    """Run the comparison, print its tables and its result as one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, help="folder for report.html and result.json")
    parser.add_argument("--workers", type=int, help="processes; else one a core")
    given = parser.parse_intermixed_args()
    job = load_job(given.job, given.overrides, KINDS)
    assert isinstance(job, ComparisonJob)
    console = Console(stderr=True, width=None if Console().is_terminal else 120)
    result = run_simulations(job, console, given.output, given.workers)
    if given.output:
        write_report(result, given.output)
    print_comparison(result, console)
    print(json.dumps({key: value for key, value in result.items() if key != "timelines"}))


if __name__ == "__main__":
    main()
