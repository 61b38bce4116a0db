"""Write the tables of README and docs from the committed results, between their markers.

    <!-- results:demo --> ... <!-- /results:demo -->

`python benchmarks/render.py` rewrites them; `--check` fails if a table is not what the results say.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKERS = re.compile(r"(<!-- results:(\w+) -->\n).*?(<!-- /results:\2 -->)", re.DOTALL)


def demo(result: dict[str, Any]) -> list[str]:
    """The frontier of the demo's checkpoint."""
    lines = [
        "| mode | accuracy (95%) | same output as `exact` | tokens per forward |",
        "|---|---|---|---|",
    ]
    for point in result["points"]:
        interval = f"{point['accuracy_low']:.1%} to {point['accuracy_high']:.1%}"
        lines.append(
            f"| `{point['label']}` | {point['accuracy']:.1%} ({interval}) | "
            f"{point['identical']:.1%} | {point['tokens_per_forward']:.2f} |"
        )
    facts = result["provenance"]
    return [*lines, "", f"{result['points'][0]['problems']} held-out problems, {_machine(facts)}."]


def gsm8k(result: dict[str, Any]) -> list[str]:
    """Both stages on GSM8K: losses and teacher-forced acceptance on the test split."""
    lines = [
        "| stage | steps | minutes | clean CE | noisy CE | survival by depth | expected T/F |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage, metrics in result["metrics"].items():
        depths = [v for k, v in metrics.items() if k.startswith("eval_acceptance_")]
        noisy, expected = metrics.get("eval_noisy_ce"), metrics.get("eval_tokens_per_forward", 1.0)
        lines.append(
            f"| `{stage}` | {result['steps'][stage]} | {result['seconds'][stage] / 60:.1f} | "
            f"{metrics['eval_clean_ce']:.3f} | {f'{noisy:.3f}' if noisy else '-'} | "
            f"{', '.join(f'{share:.3f}' for share in depths) or '-'} | {expected:.2f} |"
        )
    return [*lines, "", f"Held-out: the 1,319 test problems. {_machine(result['provenance'])}."]


def train_step(result: dict[str, Any]) -> list[str]:
    """A step's cost over SFT."""
    lines = [
        "| shape | objective | rows | s | time / SFT | peak memory / SFT |",
        "|---|---|---|---|---|---|",
    ]
    for case, objectives in result["cases"].items():
        for name, row in objectives.items():
            lines.append(
                f"| {case} | {name} | {row['rows']:.0f} | {row['step_s']:.2f} | "
                f"{row['time_ratio']:.2f} | "
                f"{row['memory_ratio']:.2f} |"
            )
    steps = " and ".join(str(case["sft"]["steps"]) for case in result["cases"].values())
    facts = _machine(result["provenance"])
    return [
        *lines,
        "",
        f"Medians of {steps} interleaved steps, float32, {result['threads']} threads, {facts}.",
    ]


def _machine(facts: dict[str, Any]) -> str:
    device = facts["gpu"] or f"{facts['cores']} cores of {facts['cpu']}"
    return f"{device}, commit {facts['commit']}"


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "demo": demo,
    "gsm8k": gsm8k,
    "train_step": train_step,
}


def render(page: str) -> str:
    """The page with every marked table made anew."""

    def table(match: re.Match[str]) -> str:
        path = RESULTS / f"{match[2]}.json"
        lines = TABLES[match[2]](json.loads(path.read_text()))
        return match[1] + "\n".join(lines) + "\n" + match[3]

    return MARKERS.sub(table, page)


def main() -> int:
    """Rewrite, or with `--check` compare."""
    check = "--check" in sys.argv[1:]
    stale = []
    for path in PAGES:
        old = path.read_text()
        new = render(old)
        if old != new:
            stale.append(path.name)
            if not check:
                path.write_text(new)
    if check and stale:
        print(f"not what the results say: {', '.join(stale)}; run python benchmarks/render.py")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
