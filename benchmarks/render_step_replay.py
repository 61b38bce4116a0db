"""Writes the tables of the step replay (step_replay.py)."""

from typing import Any

from render_sweeps import machine


def step_replay(result: dict[str, Any]) -> list[str]:
    """Errors of single steps, of steps by their rows, and of what requests see."""
    modes = result["modes"]
    runs = f"mean of {result['runs']} runs"
    return [
        f"| mode | steps | noise | against one run | against the {runs} | all steps together |",
        "|---|---|---|---|---|---|",
        *(
            f"| `{name}` | {mode['one_run']['steps']} | {_both(mode['noise'])} | "
            f"{_both(mode['one_run'])} | {_both(mode['mean_of_runs'])} | "
            f"{mode['mean_of_runs']['bias']:+.1%} |"
            for name, mode in modes.items()
        ),
        "",
        "Errors of single steps: median (P90). Noise: a run of the same batches beside another.",
        "",
        "| mode | steps | rows up to | number | share of the time | bias | median (P90) |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| `{name}` | {row['steps_of']} | {row['rows']} | {row['steps']} | "
            f"{row['share']:.0%} | {row['bias']:+.1%} | {_both(row)} |"
            for name, mode in modes.items()
            for row in mode["by_rows"]
        ),
        "",
        "| mode | | first token P50 | P90 | time per token P50 | P90 |",
        "|---|---|---|---|---|---|",
        *(
            _seen(name, how, mode[key])
            for name, mode in modes.items()
            for how, key in _WAYS.items()
        ),
        "",
        f"{result['requests']} requests, processor time of one thread, "
        f"{machine(result['provenance'])}.",
    ]


_WAYS = {"recorded batches": "replayed", "arrivals alone": "whole"}


def _both(errors: dict[str, float]) -> str:
    return f"{errors['median']:.1%} ({errors['p90']:.1%})"


def _seen(name: str, how: str, found: dict[str, dict[str, float]]) -> str:
    cells = [
        f"{1e3 * each['predicted_s']:,.0f} for {1e3 * each['measured_s']:,.0f} ms "
        f"({each['error']:+.1%})"
        for each in found.values()
    ]
    return f"| `{name}` | {how} | {' | '.join(cells)} |"
