"""The comparison on a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from mars_ray.simulator.report import policy_table
from policies.verdict import margin, percent, verdicts


def print_comparison(result: dict[str, Any], console: Console) -> None:
    """Print how each policy fares over all cells, what a valve brought, and the verdicts."""
    console.print(policy_table(result))
    valves = [cell for cell in result["cells"] if "valve" in cell]
    if valves:
        console.print(_valves(valves))
    for one in verdicts(result):
        holds = {True: "yes", False: "no", None: "-"}[one.holds]
        console.print(f"{holds:>3}  {one.claim}: {one.measured}", highlight=False, markup=False)


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
