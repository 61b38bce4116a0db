"""Tables of simulations and of their comparison with live runs, for render.py."""

import statistics
from typing import Any

from render_sweeps import machine

from mars_ray.simulator.plots import best_fixed
from mars_ray.simulator.printed import policy_rows
from mars_ray.simulator.verdict import margin, percent, verdicts


def _knob(knob: dict[str, Any]) -> str:
    value, aim, caution = knob["value"], knob["manner"]["aim"], knob["manner"]["caution"]
    said = [value] if aim == 1 else [value, aim] if caution == 1 else [value, aim, caution]
    return ", ".join(f"{number:g}" for number in said)


def simulation(result: dict[str, Any]) -> list[str]:
    """A comparison of policies, one block per trace; rows that miss the objective are marked."""
    job = result["job"]
    wanted = job["scaling"]["slo"]["attainment"]
    traces = result["cold_starts"][f"{job['cluster']['cold_start_s']:g}"]
    lines = [
        "| trace | policy | tuned to | mean replicas | `mars` takes | in time "
        "| effective accuracy | points lost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for trace, policies in traces.items():
        own_s = policies["mars"]["mean"]["replica_s"]
        for policy, row in policies.items():
            mean, half = row["mean"], row["half_width"]
            mark = "" if mean["attainment"] >= wanted else " *"
            lines.append(
                f"| {trace} | `{policy}` | {_knob(row['knob'])} | {mean['mean_replicas']:.2f}"
                f"{margin(half['mean_replicas'])} | {own_s / mean['replica_s']:.0%} | "
                f"{mean['attainment']:.2%}{mark} | "
                f"{mean['effective_accuracy']:.2f}{margin(half['effective_accuracy'])} | "
                f"{mean['points_lost']:.2f} |"
            )
    return [
        *lines,
        "",
        f"{result['model']['name']}, {len(job['seeds'])} seeds, 95% intervals; `mars` takes: its "
        "replica-seconds as a share of this policy's; tuned to: replicas or a share, the aim, and "
        f"the caution where it is not 1; * misses {percent(wanted)} in time. "
        f"Commit {result['provenance']['commit']}.",
    ]


def cold_starts(result: dict[str, Any]) -> list[str]:
    """The same comparison by the start time of a replica."""
    job, colds = result["job"], result["cold_starts"]
    wanted = job["scaling"]["slo"]["attainment"]
    ordered = sorted(colds, key=float)
    lines = [
        "| trace | policy | " + " | ".join(f"{cold} s" for cold in ordered) + " |",
        "|---|---|" + "---|" * len(ordered),
    ]
    for trace in job["traces"]:
        for policy in job["policies"]:
            means = [colds[cold][trace][policy]["mean"] for cold in ordered]
            cells = [_fleet(mean, wanted) for mean in means]
            lines.append(f"| {trace} | `{policy}` | {' | '.join(cells)} |")
    return [*lines, "", _fleets_facts(result)]


def fleets(result: dict[str, Any]) -> list[str]:
    """The size of each policy's fleet, trace by trace."""
    job = result["job"]
    wanted = job["scaling"]["slo"]["attainment"]
    traces = result["cold_starts"][f"{job['cluster']['cold_start_s']:g}"]
    lines = ["| policy | " + " | ".join(traces) + " |", "|---|" + "---|" * len(traces)]
    for policy in job["policies"]:
        cells = [_fleet(policies[policy]["mean"], wanted) for policies in traces.values()]
        lines.append(f"| `{policy}` | {' | '.join(cells)} |")
    return [*lines, "", _fleets_facts(result)]


def _fleet(mean: dict[str, float], wanted: float) -> str:
    mark = "" if mean["attainment"] >= wanted else " *"
    return f"{mean['mean_replicas']:.2f} ({mean['attainment']:.1%}{mark})"


def _fleets_facts(result: dict[str, Any]) -> str:
    job = result["job"]
    return (
        f"Mean replicas (in time), {len(job['seeds'])} seeds; "
        f"* misses {percent(job['scaling']['slo']['attainment'])}. "
        f"{result['model']['name']}. Commit {result['provenance']['commit']}."
    )


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
    columns = (
        ("mars", "default"),
        ("ray", "default"),
        ("ray", "tuned"),
        ("ray-verified", "tuned"),
        ("keda", "default"),
        ("fixed-verified", "default"),
    )
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
