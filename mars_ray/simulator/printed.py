"""The comparison on a terminal."""

from collections import defaultdict
from typing import Any

from rich.console import Console
from rich.table import Table

from mars_ray.simulator.verdict import margin, percent, verdicts


def print_comparison(result: dict[str, Any], console: Console) -> None:
    """Print how each policy fares over all cells, what a valve brought, and the verdicts."""
    console.print(_policies(result))
    valves = [cell for cell in result["cells"] if "valve" in cell]
    if valves:
        console.print(_valves(valves))
    for one in verdicts(result):
        holds = {True: "yes", False: "no", None: "-"}[one.holds]
        console.print(f"{holds:>3}  {one.claim}: {one.measured}", highlight=False, markup=False)


def policy_rows(result: dict[str, Any]) -> list[tuple[str, str, int, int, float, float]]:
    """Policy, group, cells, cells attained, and of these the means of replicas over the average
    need of lossless decoding and of points lost. NaN where none is attained."""
    wanted = {name: slo["attainment"] for name, slo in result["job"]["slos"].items()}
    counted: dict[tuple[str, str], list[tuple[bool, float, float]]] = defaultdict(list)
    for cell in result["cells"]:
        for policy, groups in cell["policies"].items():
            for group, row in groups.items():
                mean = row["mean"]
                counted[policy, group].append(
                    (
                        mean["attainment"] >= wanted[cell["regime"]],
                        mean["mean_replicas"] / cell["lossless"],
                        mean["points_lost"],
                    )
                )
    return [
        (policy, group, len(rows), *_of_attained(rows)) for (policy, group), rows in counted.items()
    ]


def _of_attained(rows: list[tuple[bool, float, float]]) -> tuple[int, float, float]:
    attained = [row for row in rows if row[0]]
    count = len(attained)
    if not count:
        return 0, float("nan"), float("nan")
    return count, sum(row[1] for row in attained) / count, sum(row[2] for row in attained) / count


def _policies(result: dict[str, Any]) -> Table:
    cells = len(result["cells"])
    table = Table(title=f"{result['job']['name']}: {cells} cells", title_justify="left")
    for name in ("policy", "settings"):
        table.add_column(name)
    for name in ("attained", "replicas over the mean need", "points lost"):
        table.add_column(name, justify="right")
    for policy, group, _, attained, over, points in policy_rows(result):
        shown = (f"{over:.2f}", f"{points:.2f}") if attained else ("-", "-")
        table.add_row(policy, group, f"{attained}/{cells}", *shown)
    return table


def _valves(cells: list[dict[str, Any]]) -> Table:
    table = Table(title="What lower thresholds kept, with the same replicas", title_justify="left")
    table.add_column("cell")
    for name in ("kept in time", "share", "in time", "points lost", "lowered"):
        table.add_column(name, justify="right")
    for cell in cells:
        mean, half = cell["valve"]["mean"], cell["valve"]["half_width"]
        table.add_row(
            f"{cell['trace']}, {cell['regime']}, {cell['cold_start_s']:g} s",
            f"{mean['kept']:.0f}{margin(half['kept'])}",
            f"{mean['kept_share']:.2%}",
            percent(round(cell["policies"]["mars"]["default"]["mean"]["attainment"], 4)),
            f"{mean['points_lost']:.2f}{margin(half['points_lost'])}",
            f"{mean['below_set_point_s']:.0f} s",
        )
    return table
