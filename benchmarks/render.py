"""Write tables and numbers of README and docs from the committed results, between their markers.

    <!-- results:demo --> ... <!-- /results:demo -->
    <!-- headline:smollm2.prompts ,d -->500<!-- /headline -->

`python benchmarks/render.py` rewrites them; `--check` fails if a table differs from the results.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headline import headlines, speed_ratio
from render_simulations import (
    ablation,
    cells,
    comparison,
    live,
    overloads,
    simulator_speed,
)
from render_step_replay import step_replay
from render_sweeps import machine, schedules, sweep
from render_vllm import plugin
from traces import table as traces

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKERS = re.compile(r"(<!-- results:(\w+) -->\n).*?(<!-- /results:\2 -->)", re.DOTALL)
# A name of headline.py, and the format of its value.
NUMBERS = re.compile(r"(<!-- headline:([\w.]+) (\S+) -->)[^<]*(<!-- /headline -->)")


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
    return [*lines, "", f"{result['points'][0]['problems']} held-out problems, {machine(facts)}."]


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
    return [*lines, "", f"Held-out: the 1,319 test problems. {machine(result['provenance'])}."]


def train_step(result: dict[str, Any]) -> list[str]:
    """A step's cost over SFT."""
    lines = [
        "| shape | objective | rows | s | tokens/s | time / SFT | peak memory / SFT |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, objectives in result["cases"].items():
        for name, row in objectives.items():
            lines.append(
                f"| {case} | {name} | {row['rows']:.0f} | {row['step_s']:.2f} | "
                f"{row['tokens_per_s']:,.0f} | "
                f"{row['time_ratio']:.2f} | "
                f"{row['memory_ratio']:.2f} |"
            )
    steps = " and ".join(str(case["sft"]["steps"]) for case in result["cases"].values())
    facts = machine(result["provenance"])
    types = "float32"
    if "precisions" in result:
        types = ", ".join(f"{case} in {kind}" for case, kind in result["precisions"].items())
    return [
        *lines,
        "",
        f"Medians of {steps} steps, ours interleaved, {types}, {result['threads']} threads, "
        f"{facts}.",
    ]


def identity_summary(result: dict[str, Any]) -> list[str]:
    """The rows in bfloat16, as `identity` has them."""
    half = result["bfloat16"]
    facts = {"largest_margin": None, "provenance": half["provenance"]}
    return identity(result | facts | {"float32": half | facts, "bfloat16": None})


def identity(result: dict[str, Any]) -> list[str]:
    """How many answers equal those of transformers, and the tokens per forward of the same runs."""
    single, limit = result["float32"], result["job"]["max_new_tokens"]
    kinds = list(result["job"]["task"]["kinds"])
    lines = [
        "| decoder | answers | identical | T/F | without loops | " + " | ".join(kinds) + " |",
        "|---|" + "---|" * (4 + len(kinds)),
    ]
    for row in single["rows"]:
        counted = row.get("tokens_per_forward")
        numbers = ["-"] * (2 + len(kinds))
        if counted:
            own = [counted["all"], counted["without_loops"], *map(counted["by_kind"].get, kinds)]
            numbers = [f"{number:.2f}" if number else "-" for number in own]
        lines.append(
            f"| {row['name']} | {row['answers']} | {row['identical']:.1%} | {' | '.join(numbers)} |"
        )
    margin = single["largest_margin"]
    worst = f"; the largest margin at a first difference is {margin:.1e}" if margin else ""
    return [
        *lines,
        "",
        f"Against {single['against']}, greedy, at most {limit} new tokens{worst}; "
        f"{machine(result['provenance'])}.",
        *(in_bfloat16(result["bfloat16"]) if result["bfloat16"] else []),
    ]


def in_bfloat16(half: dict[str, Any]) -> list[str]:
    """Answers in bfloat16 beside those of plain decoding in the same batches."""
    lines = [
        "",
        "| in bfloat16 | answers | identical | T/F without loops | margins: median, largest |",
        "|---|---|---|---|---|",
    ]
    for row in (*half["rows"], *([half["floor"]] if "floor" in half else [])):
        margins = sorted(difference["margin"] for difference in row["differences"]) or [0.0]
        counted = row.get("tokens_per_forward")
        speed = f"{counted['without_loops']:.2f}" if counted else "-"
        lines.append(
            f"| {row['name']} | {row['answers']} | {row['identical']:.1%} | {speed} | "
            f"{statistics.median(margins):.3f}, {margins[-1]:.3f} |"
        )
    return [
        *lines,
        "",
        f"Against {half['against']}; margins between the two likeliest logits at first "
        f"differences; {machine(half['provenance'])}.",
    ]


def adapter_parts(result: dict[str, Any]) -> list[str]:
    """Final results of adapter trainings that differ in one part."""
    lines = [
        "| training | mask tokens | T/F, all outcomes | one group | survival by depth |",
        "|---|---|---|---|---|",
    ]
    for name, found in result["variants"].items():
        depths = ", ".join(f"{share:.3f}" for share in found["survival"])
        lines.append(
            f"| {name} | {found['mask_tokens']:,.0f} | {found['tokens_per_forward']:.3f} | "
            f"{found['one_group']:.3f} | {depths} |"
        )
    return [
        *lines,
        "",
        f"Teacher-forced over {result['held_out']} held-out answers, after {result['steps']} "
        f"conversations each unless said otherwise; {machine(result['provenance'])}.",
    ]


def adapter_training(result: dict[str, Any]) -> list[str]:
    """T/F of held-out answers during a training, and of short trainings that differ in one part."""
    run = result["run"]
    lines = [
        "| mask tokens | seconds | T/F, all outcomes |",
        "|---|---|---|",
        *(f"| {masks:,} | {seconds:.0f} | {tf:.2f} |" for masks, seconds, tf in run["curve"]),
        "",
        "| short training | mask tokens | T/F, all outcomes | without the head |",
        "|---|---|---|---|",
    ]
    order = sorted(result["screening"].items(), key=lambda item: -item[1]["tokens_per_forward"])
    lines += [
        f"| {name} | {found['mask_tokens']:,} | {found['tokens_per_forward']:.3f} | "
        f"{found['rows_alone']:.3f} |"
        for name, found in order
    ]
    answers = result["answers"]
    return [
        *lines,
        "",
        f"Teacher-forced over {result['held_out']} held-out answers; {answers['own_prompts']:,} "
        f"answers to own prompts and {answers['real_prompts']:,} to real ones (the short ones: the "
        f"latter, six beside each other); {machine(result['provenance'])}.",
    ]


def step_before_after(result: dict[str, Any]) -> list[str]:
    """Milliseconds of a step of each shape in two checkouts."""
    lines = ["| step | before | now | times as fast (rounds) |", "|---|---|---|---|"]
    for own in result["shapes"]:
        lines.append(
            f"| {own['dtype']}, {own['shape']} | {1000 * own['before_s']:.1f} ms | "
            f"{1000 * own['after_s']:.1f} ms | {own['ratio']:.2f} ({own['least']:.2f} to "
            f"{own['most']:.2f}) |"
        )
    before = result["sides"]["before"]["provenance"]["commit"]
    return [
        *lines,
        "",
        f"SmolLM2 with its adapter; medians of {result['rounds']} interleaved rounds, "
        f"{result['threads']} threads; before: commit {before}; {machine(result['provenance'])}.",
    ]


def gpu_steps(result: dict[str, Any]) -> list[str]:
    """Milliseconds of a step by sequences, rows and masks, and the share of the bandwidth."""
    lines = [
        "| model | sequences | one row each | 4 rows | of them 2 masks | 9 rows | of them 5 masks "
        "| bandwidth |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, model in result["models"].items():
        cases = [case for case in model["cases"] if case["context"] == 128]
        for graphs, sequences in dict.fromkeys((c["graphs"], c["sequences"]) for c in cases):
            own = {
                case["rows"]: case
                for case in cases
                if (case["graphs"], case["sequences"]) == (graphs, sequences)
            }
            plain = own[1]["seconds"]
            share = model["bytes"] / plain / result["bytes_per_s"]
            numbers = [plain, own[4]["seconds"], own[4]["with_masks"]]
            numbers += [own[9]["seconds"], own[9]["with_masks"]]
            row = " | ".join(f"{1000 * number:.2f}" for number in numbers)
            label = f"{sequences}" if graphs else f"{sequences}, torch, no graphs"
            lines.append(f"| {name} | {label} | {row} | {share:.0%} |")
    return [
        *lines,
        "",
        "Milliseconds of a step with Python and the copy to the host, least of ten; 128 tokens in "
        "each cache; random weights but for smollm2, random adapters of rank 32 with a head; "
        f"share of {result['bytes_per_s'] / 1e12:.1f} TB/s that a copy moves; bfloat16, "
        f"{machine(result['provenance'])}.",
    ]


def decode(result: dict[str, Any]) -> list[str]:
    """Tokens per second of every decoder at every batch size, also as a multiple of the peer's."""
    job, cases = result["job"], result["cases"]
    sampled = any(case.get("temperature") for case in cases)
    of = {(_decoder(case, sampled), case["batch"]): case for case in cases}
    labels = list(dict.fromkeys(label for label, _ in of))
    # Results of today have their ratios, which are those to the first decoder.
    base = "vllm" if "vllm" in labels and "temperature" not in cases[0] else labels[0]
    sizes = job["batch_sizes"]
    lines = [
        "| decoder | "
        + " | ".join(f"batch {size}" for size in sizes)
        + " | T/F | positions / token | same output |",
        "|---|" + "---|" * (len(sizes) + 3),
    ]
    for label in labels:
        own = {size: of[label, size] for size in sizes if (label, size) in of}
        cells = [_speed(own[size], of[base, size]) if size in own else "-" for size in sizes]
        last = own.get(sizes[-1], {})
        counted = [f"{last[key]:.2f}" if key in last else "-" for key in _COUNTS]
        same = min(case["same_output"] for case in own.values())
        lines.append(f"| {label} | {' | '.join([*cells, *counted])} | {same:.0%} |")
    times = f"{cases[0]['label']} at the same temperature" if sampled else base
    return [
        *lines,
        "",
        f"Tokens/s, and times {times} (median of {job['repeats']} interleaved rounds); T/F and "
        f"positions at batch {sizes[-1]}; {job['dtype']}, {job['threads']} thread(s), "
        f"{machine(result['provenance'])}.",
    ]


_COUNTS = ("tokens_per_forward", "positions_per_token")


def _decoder(case: dict[str, Any], sampled: bool) -> str:
    return f"{case['label']}, temperature {case['temperature']:g}" if sampled else case["label"]


def _speed(own: dict[str, Any], base: dict[str, Any]) -> str:
    """Tokens per second, and how many times those of another. Where the rounds tell no ratio, or
    masks are forced, there is none."""
    if "tokens_per_s" not in own:
        return "-"
    shown = f"{own['tokens_per_s']:,.0f}"
    if own.get("fault"):
        return shown
    if ratios := own.get("speed_ups"):
        return f"{shown} ({own['speed_up']:.2f}x, {min(ratios):.2f}-{max(ratios):.2f})"
    return f"{shown} ({speed_ratio(own, base):.2f}x)"


# Qwen2.5-7B, B = 4, GSM8K at threshold 0.95, 0.9, 0.8 (arXiv 2604.07023, tables of the paper).
_PAPER_TOKENS_PER_FORWARD = (1.79, 1.96, 2.19)


def steps(result: dict[str, Any]) -> list[str]:
    """Cost of a step by positions per sequence, and the gain of the paper's T/F at that cost."""
    of = {(step["batch"], step["positions"]): step["seconds"] for step in result["steps"]}
    counts = sorted({positions for _, positions in of})
    lines = [
        "| sequences | "
        + " | ".join(f"{n} pos." for n in counts)
        + " | speed-up at T/F "
        + " / ".join(map(str, _PAPER_TOKENS_PER_FORWARD))
        + " |",
        "|---|" + "---|" * (len(counts) + 1),
    ]
    for batch in sorted({batch for batch, _ in of}):
        cells = [
            f"{1e3 * of[batch, n]:.0f} ms ({of[batch, n] / of[batch, 1]:.2f}x)" for n in counts
        ]
        # The paper's rule at B = 4: the last token and four masks.
        cost = of[batch, 5] / of[batch, 1]
        gains = " / ".join(f"{gain / cost:.2f}x" for gain in _PAPER_TOKENS_PER_FORWARD)
        lines.append(f"| {batch} | {' | '.join(cells)} | {gains} |")
    job = result["job"]
    return [
        *lines,
        "",
        f"Medians of {job['repeats']} interleaved rounds, {job['dtype']}, {job['threads']} "
        f"thread(s), {machine(result['provenance'])}.",
    ]


def measures_overhead(result: dict[str, Any]) -> list[str]:
    """Share of the engine's time that the live measures take."""
    lines = ["| mode | share of the time |", "|---|---|"]
    lines += [f"| {name} | {share:.2%} |" for name, share in result["share"].items()]
    facts = machine(result["provenance"])
    return [*lines, "", f"Medians of {result['rounds']} rounds, {facts}."]


def capacity(result: dict[str, Any]) -> list[str]:
    """Tokens per second of a replica, also as a multiple of `exact`, by batch and level."""
    lines = []
    for model in result["models"].values():
        base = model["levels"][0]["tokens_per_s"]
        lines += [
            f"**{model['name']}**; {model['prompt_tokens']:g} tokens in, "
            f"{model['output_tokens']:g} out:",
            "",
            "| level | points lost | " + " | ".join(f"batch {batch}" for batch in base) + " |",
            "|---|---|" + "---|" * len(base),
        ]
        for level in model["levels"]:
            rates = level["tokens_per_s"]
            cells = [f"{rate:,.0f} ({rate / base[batch]:.2f}x)" for batch, rate in rates.items()]
            lines.append(f"| {level['label']} | {level['points_lost']:.1f} | {' | '.join(cells)} |")
        lines.append("")
    return [*lines, f"Tokens/s, by commit {result['provenance']['commit']}."]


def serve_load(result: dict[str, Any]) -> list[str]:
    """The live service compared with the bare engine and vLLM, and at rising rates."""
    lines = ["| mode | bare engine | service | share | tokens per chunk |", "|---|---|---|---|---|"]
    lines += [
        f"| {mode} | {row['engine_tokens_per_s']:,.0f} | {row['service_tokens_per_s']:,.0f} | "
        f"{row['share']:.0%} | {row['tokens_per_chunk']:.1f} |"
        for mode, row in result["engine"].items()
    ]
    lines += [
        "",
        f"Tokens/s at batch {result['batch']}, {result['clients']} clients, at most "
        f"{result['new_tokens']} tokens an answer.",
        "",
    ]
    if firsts := result.get("first_tokens"):
        both = "; ".join(
            f"{first['service_ms']:.1f} ms over HTTP{front.replace(',', ' and')}, "
            f"{first['added_ms_p50']:.1f} ms more at the median"
            for front, first in firsts.items()
        )
        alone = statistics.median(first["engine_ms"] for first in firsts.values())
        lines += [f"A first token takes {alone:.1f} ms in the process; {both}.", ""]
    if "vllm" in result:
        lines += _beside_vllm(result["vllm"])
    if "rates" in result:
        lines += _rates(result["rates"])
    facts = machine(result["provenance"])
    return [*lines, f"Medians of {result['rounds']} interleaved rounds, {facts}."]


def _beside_vllm(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| service | clients | tokens/s | times vLLM | first token, ms | per token, ms |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['service']} | {row['clients']} | {row['tokens_per_s']:,.0f} | "
        f"{row['times_vllm']:.2f} | {row['first_token_ms_p50']:.1f} | "
        f"{row['per_token_ms_p50']:.2f} |"
        for row in rows
    ]
    return [*lines, ""]


def _rates(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| replicas | asked, 1/s | answered, 1/s | tokens/s | first token p50 / p90 / p99, ms "
        "| per token p50 / p90 / p99, ms | errors |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = [
            " / ".join(f"{row[f'{name}_{point}']:.1f}" for point in ("p50", "p90", "p99"))
            for name in ("first_token_ms", "per_token_ms")
        ]
        lines.append(
            f"| {row['replicas']} | {row['rate']:g} | {row['answers_per_s']:.1f} | "
            f"{row['tokens_per_s']:,.0f} | {' | '.join(times)} | {row['errors']:g} |"
        )
    return [*lines, ""]


def load_tools(result: dict[str, Any]) -> list[str]:
    """What load tools of others have counted. No speeds: the tools compute beside the service."""
    lines = [
        "| tool | version | answers | failed | output tokens |",
        "|---|---|---|---|---|",
    ]
    for row in result["tools"]:
        lines.append(
            f"| {row['tool']} | {row['version']} | {row['completed']} | {row['failed']} | "
            f"{row['output_tokens']:,} |"
        )
    sizes = f"{result['prompt_tokens']} and {result['output_tokens']} tokens"
    return [
        *lines,
        "",
        f"{result['model']} with its draft adapter, {result['requests']} requests by "
        f"{result['clients']} clients, prompts and answers of {sizes}, "
        f"{machine(result['provenance'])}.",
    ]


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "demo": demo,
    "gsm8k": gsm8k,
    "smollm2_identity": identity,
    "summary_smollm2_identity": identity_summary,
    "smollm2_decode": decode,
    "smollm2_decode_epyc": decode,
    "ngram_edit": decode,
    "ngram_summarise": decode,
    "adapter_step": train_step,
    "adapter_parts": adapter_parts,
    "adapter_training_gpu": adapter_training,
    "gpu_step": gpu_steps,
    "step_before_after": step_before_after,
    "smollm2_identity_gpu": lambda result: in_bfloat16(result["bfloat16"]),
    "train_step": train_step,
    "decode_demo": decode,
    "decode_demo_large": decode,
    "decode_demo_xeon": decode,
    "measures_overhead": measures_overhead,
    "decode_0_5b": decode,
    "decode_0_5b_xeon": decode,
    "serve_load": serve_load,
    "serve_load_0_5b": serve_load,
    "policy_ablation": ablation,
    "simulate": comparison,
    "cells_simulate": cells,
    "simulate_measured": comparison,
    "cells_simulate_measured": cells,
    "simulate_days": comparison,
    "cells_simulate_days": cells,
    "simulate_overloads": overloads,
    "live": live,
    "live_kill": live,
    "live_vllm": live,
    "simulator_speed": simulator_speed,
    "traces": traces,
    "step_replay": step_replay,
    "steps_0_5b": steps,
    "steps_0_5b_xeon": steps,
    "capacity": capacity,
    "sweep_demo": sweep,
    "schedules_demo": schedules,
    "load_tools": load_tools,
    "vllm_plugin": plugin,
    "vllm_plugin_tiny": plugin,
    "vllm_bfloat16": in_bfloat16,
}


def render(page: str) -> str:
    """The page with every marked table and number replaced. Raises KeyError for a number whose
    result does not exist."""

    def table(match: re.Match[str]) -> str:
        name = match[2].removeprefix("summary_").removeprefix("cells_").replace("steps", "decode")
        path = RESULTS / f"{name}.json"
        lines = TABLES[match[2]](json.loads(path.read_text()))
        return match[1] + "\n".join(lines) + "\n" + match[3]

    found, _ = headlines()

    def number(match: re.Match[str]) -> str:
        return match[1] + format(found[match[2]]["value"], match[3]) + match[4]

    return NUMBERS.sub(number, MARKERS.sub(table, page))


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
