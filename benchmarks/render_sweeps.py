"""Tables of sweeps and of compared schedules, for render.py."""

from typing import Any


def sweep(result: dict[str, Any]) -> list[str]:
    """How the trials ended, and the survivors' settings and measures."""
    summary = result["summary"]
    lines = [
        "| trial | settings | expected T/F | clean loss | `exact` (95%) | T/F (threshold) |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["trials"]:
        if row["exact_accuracy"] is None:
            continue
        mark = "**" if row["best"] else ""
        low, high = row["exact_accuracy_low"], row["exact_accuracy_high"]
        lines.append(
            f"| {mark}{row['trial'].rpartition('_')[2]}{mark} | {_settings(row['values'])} | "
            f"{row['tokens_per_forward_expected']:.2f} | {row['clean_ce']:.4f} | "
            f"{row['exact_accuracy']:.1%} ({low:.1%} to {high:.1%}) | "
            f"{row['tokens_per_forward']:.2f} ({row['threshold']:g}) |"
        )
    return [
        *lines,
        "",
        f"The survivors of {summary['trials']} trials ({summary['stopped']} ended early, "
        f"{summary['failed']} failed), the best in bold. Trained: {summary['steps_trained']:,} "
        f"steps, {summary['steps_saved_factor']:.1f} times fewer than all trials to the end. "
        f"`exact` before the stage: {summary['start_exact_accuracy']:.1%}. "
        f"{machine(result['provenance'])}.",
    ]


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {_setting(v)}" for key, v in values.items())


def _setting(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(_setting(part) for part in value.values())
    if isinstance(value, list):
        return "/".join(_setting(part) for part in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def schedules(result: dict[str, Any]) -> list[str]:
    """Variants at equal steps, as differences from the first one."""
    rows, plan = result["comparison"], result["plan"]
    lines = [
        "| variant | seeds | T/F, one group | difference | T/F, all outcomes | difference | "
        "`exact` | difference | clean loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['variant']} | {len(row['seeds'])} | {row['tokens_per_forward']:.3f} | "
        f"{difference(row, 'tokens_per_forward', '+.3f')} | "
        f"{row['tokens_per_forward_all_outcomes']:.3f} | "
        f"{difference(row, 'tokens_per_forward_all_outcomes', '+.3f')} | "
        f"{row['exact_accuracy']:.1%} | "
        f"{difference(row, 'exact_accuracy', '+.1%')} | {row['clean_ce']:.4f} |"
        for row in rows
    ]
    return [
        *lines,
        "",
        f"{result['runs'][0]['steps']} steps, {plan['problems']} held-out problems; T/F of "
        f"`verified` at its whole window, masks behind all drafts or behind each; differences to "
        f"{rows[0]['variant']} at the same seeds, with 95% intervals where there are several. "
        f"{machine(result['provenance'])}.",
    ]


def difference(row: dict[str, Any], measure: str, form: str) -> str:
    """The mean difference from the first variant, with its interval if there is one."""
    half = row[f"{measure}_half_width"]
    text = format(row[f"{measure}_difference"], form)
    return text if half is None else f"{text} ± {format(half, form).lstrip('+')}"


def machine(facts: dict[str, Any]) -> str:
    """A short description of the machine that a result was measured on."""
    device = facts["gpu"] or f"{facts['cores']} cores of {facts['cpu']}"
    return f"{device}, commit {facts['commit']}"
