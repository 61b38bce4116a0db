"""Tables of simulations and of their comparison with live runs, for render.py."""

import statistics
from typing import Any

from policies.verdict import best_fixed, margin, verdicts
from render_sweeps import machine

from mars_ray.simulator.report import policy_rows


def _fleet(mean: dict[str, float], wanted: float) -> str:
    mark = "" if mean["attainment"] >= wanted else " *"
    return f"{mean['mean_replicas']:.2f} ({mean['attainment']:.1%}{mark})"


def comparison(result: dict[str, Any]) -> list[str]:
    """What is said of our policy as it ships, and how all fare over all cells."""
    holds = {True: "yes", False: "**no**", None: ""}
    lines = ["| of `mars` as it ships | measured | holds |", "|---|---|---|"]
    lines += [f"| {one.claim} | {one.measured} | {holds[one.holds]} |" for one in verdicts(result)]
    lines += [
        "",
        "| policy | settings | cells attained | replicas over the mean need | points lost |",
        "|---|---|---|---|---|",
    ]
    for policy, group, cells, attained, over, points in policy_rows(result):
        shown = f"{over:.2f} | {points:.2f}" if attained else "- | -"
        lines.append(f"| `{policy}` | {group} | {attained} of {cells} | {shown} |")
    return [
        *lines,
        "",
        "Replicas over what lossless decoding needs on average, in the cells that a policy "
        f"attains. {_cells_facts(result)}",
    ]


def cells(result: dict[str, Any]) -> list[str]:
    """Cell by cell: the best fixed fleet, the bound, and a few policies beside it."""
    wanted_columns = (
        ("mars", "default"),
        ("ray", "default"),
        ("ray", "tuned"),
        ("ray-verified", "tuned"),
        ("keda-verified", "default"),
        ("fixed-verified", "default"),
    )
    columns = [
        (policy, group)
        for policy, group in wanted_columns
        if any(group in cell["policies"].get(policy, {}) for cell in result["cells"])
    ]
    heads = " | ".join(f"`{policy}`, {group}" for policy, group in columns)
    lines = [
        f"| trace | regime | cold start | bound | best fixed | {heads} |",
        "|---|---|---|---|---|" + "---|" * len(columns),
    ]
    wanted = {name: slo["attainment"] for name, slo in result["job"]["slos"].items()}
    for cell in result["cells"]:
        best = best_fixed(cell)
        fixed = "-" if best is None else f"{best / cell['duration_s']:.2f}"
        shown = [
            _fleet(row["mean"], wanted[cell["regime"]])
            if (row := cell["policies"].get(policy, {}).get(group))
            else ""
            for policy, group in columns
        ]
        lines.append(
            f"| {cell['trace']} | {cell['regime']} | {cell['cold_start_s']:g} s | "
            f"{cell['bound']['lossless']:.2f} | {fixed} | {' | '.join(shown)} |"
        )
    return [*lines, "", f"Mean replicas (in time), * misses. {_cells_facts(result)}"]


def overloads(result: dict[str, Any]) -> list[str]:
    """What lower thresholds kept in time, on equal replicas."""
    lines = [
        "| trace | regime | cold start | in time | without | kept in time | points lost "
        "| lowered |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in result["cells"]:
        mean, half = cell["valve"]["mean"], cell["valve"]["half_width"]
        both = [cell["policies"][name]["default"]["mean"] for name in ("mars", "mars-lossless")]
        shares = " | ".join(f"{one['attainment']:.2%}" for one in both)
        lines.append(
            f"| {cell['trace']} | {cell['regime']} | {cell['cold_start_s']:g} s | {shares} | "
            f"{mean['kept']:,.0f}{margin(half['kept'])} | "
            f"{mean['points_lost']:.2f}{margin(half['points_lost'])} | "
            f"{mean['below_set_point_s']:.0f} s |"
        )
    return [*lines, "", f"Equal replicas and requests. {_cells_facts(result)}"]


def _cells_facts(result: dict[str, Any]) -> str:
    job, cost = result["job"], result["cost"]
    fewer = [
        f"{len(special['seeds'])} of {trace}"
        for trace, special in job["per_trace"].items()
        if special["seeds"]
    ]
    seeds = f"{len(job['seeds'])} seeds" + (f" ({', '.join(fewer)})" if fewer else "")
    return (
        f"{result['model']['name']}, {seeds}, 95% intervals; {cost['runs']:,} runs. Commit "
        f"{result['provenance']['commit']}."
    )


def ablation(result: dict[str, Any]) -> list[str]:
    """What is left of the policy without each of its parts."""
    lines = [
        "| policy | cells attained | in time | replicas over the best fixed fleet |",
        "|---|---|---|---|",
    ]
    for name, row in result["variants"].items():
        lines.append(
            f"| {name} | {row['attained']} of {row['cells']} | {row['in_time']:.2%} | "
            f"{row['over_best_fixed']:.2f} |"
        )
    return [*lines, "", f"Means over cells, one seed. Commit {result['provenance']['commit']}."]


def live(result: dict[str, Any]) -> list[str]:
    """A live autoscaled run compared with the simulation of the same requests."""
    rows = (
        ("requests", "requests", "{:,.0f}"),
        ("in time", "attainment", "{:.1%}"),
        ("first token, P50", "ttft_p50_s", "{:.3f} s"),
        ("first token, P90", "ttft_p90_s", "{:.3f} s"),
        ("whole answer, P90", "answer_p90_s", "{:.2f} s"),
        ("replica-seconds", "replica_s", "{:,.0f}"),
        ("replicas at most", "peak_replicas", "{:.0f}"),
        ("below the set-point", "below_set_point_s", "{:.0f} s"),
    )
    lines = ["| | live | simulated | ratio |", "|---|---|---|---|"]
    for name, key, form in rows:
        one, other = result["live"][key], result["simulated"][key]
        ratio = f"{other / one:.2f}" if one else "-"
        lines.append(f"| {name} | {form.format(one)} | {form.format(other)} | {ratio} |")
    told = result["live"]
    slow = result["slowness"]
    lowered = (
        f"{told['lowered']} answers had a lower threshold, {told['pinned_below_floor']} of those "
        f"that pin one; {told['cut']} streams broke off and were asked for again, "
        f"{told['refused']} were refused at first, {told['requests'] - told['answered']} lost."
    )
    return [
        *lines,
        "",
        f"{lowered} Steps were told to take {statistics.median(slow):.1f} times what the service "
        f"model says at the median of {len(slow)} times ten seconds, a replica "
        f"{result['cold_start_s']:.0f} s to start, and a reply's way "
        f"{1e3 * result['overhead_s']:.0f} ms. {machine(result['provenance'])}; "
        f"simulated at {result['simulated_commit']}.",
    ]


def simulator_speed(result: dict[str, Any]) -> list[str]:
    """Simulated requests per processor second."""
    lines = [
        "| replicas | policy | a tick every | requests | in the system, per replica | "
        "requests per processor second |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {case['replicas']:,} | `{case['policy']}` | {case['tick_s']:g} s | "
        f"{case['requests']:,} | {case['mean_outstanding']:.0f} | "
        f"{case['requests_per_cpu_s']:,.0f} |"
        for case in result["cases"]
    ]
    return [*lines, "", f"One core, {machine(result['provenance'])}."]
