"""Tables of vLLM with the plug-in beside plain vLLM, for render.py."""

from typing import Any

from render_sweeps import machine


def _in_processes(timed: dict[str, Any]) -> str:
    count = len(timed.get("processes", [None]))
    if count == 1:
        return ""
    return f" of {count} processes, every second of which makes the plug-in's engine first"


def plugin(result: dict[str, Any]) -> list[str]:
    """Text and T/F of all prompts, then tokens per second by batch size (vllm_plugin.py)."""
    counted, sampled = result["tokens_per_forward"], result["sampled"]
    lines = [
        f"- Equal to plain vLLM's: {result['identical_share']:.1%} of {result['prompts']} answers.",
        f"- T/F without the {result['looping']} answers that loop: "
        f"{counted['vllm']['without_loops']:.2f}; our engine with one group of masks "
        f"{counted['ours']['without_loops']:.2f}; sampled at temperature 1 "
        f"{sampled['tokens_per_forward']:.2f}.",
        f"- Forwards that carried drafts: {result['greedy']['share_with_drafts']:.0%}.",
        "",
        "| batch | plain vLLM, tokens/s | with the plug-in | ratio: median (rounds) | T/F | "
        "forwards with drafts |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["speed"]:
        ratios, steps = row["ratios"], row["steps"]
        lines.append(
            f"| {row['batch']} | {row['plain_tokens_per_s']:,.1f} | "
            f"{row['mars_tokens_per_s']:,.1f} | {row['over_plain']:.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f}) | {steps['tokens_per_forward']:.2f} | "
            f"{steps['share_with_drafts']:.0%} |"
        )
    timed = result["speed"][0]
    return [
        *lines,
        "",
        f"vLLM {result['vllm']}, float32, greedy, {timed['prompts']} prompts and "
        f"{timed['tokens']:,} tokens in each of {len(timed['ratios'])} interleaved rounds"
        f"{_in_processes(timed)}, as many masks as pay; {machine(result['provenance'])}.",
    ]
