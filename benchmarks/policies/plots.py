"""The report's map of all cells."""

from collections.abc import Iterator, Mapping
from html import escape
from itertools import groupby
from typing import Any

from matplotlib.colors import LinearSegmentedColormap, to_hex

from policies.verdict import best_fixed

# Replicas over those of the best fixed fleet: half of them, as many, and three times as many.
_SHADES = LinearSegmentedColormap.from_list("cost", ["#1b7f5c", "#b7e0c8", "#fbe6b5", "#f0a35c"])
_CHEAP, _DEAR = 0.5, 3.0


def cell_map(cells: list[dict[str, Any]], wanted: Mapping[str, float]) -> str:
    """An HTML table with a row for each policy and group, and a column for each cell."""
    rows = list(dict.fromkeys(_names(cells)))
    body = "".join(
        f"<tr class='{_kind(policy)}'><th>{escape(policy)}<td class=group>{escape(group)}"
        + "".join(_square(cell, policy, group, wanted[cell["regime"]]) for cell in cells)
        for policy, group in rows
    )
    return f"<table class=map>{_heads(cells)}{body}</table>"


def _names(cells: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for cell in cells:
        for policy, groups in cell["policies"].items():
            yield from ((policy, group) for group in groups)


def _kind(policy: str) -> str:
    return "mars" if policy == "mars" else ""


def _heads(cells: list[dict[str, Any]]) -> str:
    """Traces, their regimes, and cold starts in seconds, each over its columns."""
    keys = ("trace", "regime", "cold_start_s")
    lines = []
    for depth in range(1, len(keys) + 1):
        columns = groupby([cell[name] for name in keys[:depth]] for cell in cells)
        heads = "".join(
            f"<th colspan={len(list(same))} class='{keys[depth - 1]}'>{_head(names[-1])}"
            for names, same in columns
        )
        lines.append(f"<tr><th><th>{heads}")
    return "".join(lines)


def _head(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else escape(value)


def _square(cell: dict[str, Any], policy: str, group: str, wanted: float) -> str:
    row = cell["policies"].get(policy, {}).get(group)
    if row is None:
        return "<td>"
    mean = row["mean"]
    title = f"{mean['attainment']:.2%} in time, {mean['mean_replicas']:.2f} replicas"
    if mean["points_lost"] >= 0.005:
        title += f", {mean['points_lost']:.2f} points lost"
    if mean["attainment"] < wanted:
        # Rounded down: 98.9 is not yet 99.
        return f"<td class=missed title='{title}'>{int(100 * mean['attainment'])}%"
    best = best_fixed(cell)
    if best is None:
        return f"<td class=alone title='{title}'>&#10003;"
    over = mean["replica_s"] / best
    shade = to_hex(_SHADES((over - _CHEAP) / (_DEAR - _CHEAP)))
    return f"<td style='background:{shade}' title='{title}'>{over:.{2 if over < 9.95 else 1}f}"
