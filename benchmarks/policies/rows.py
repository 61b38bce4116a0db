"""Rows of the result: means over seeds, with their intervals."""

from collections.abc import Sequence
from typing import Any

from mars_ray.simulator.report import FIGURES, means
from policies.contenders import Knob, Setting


def made_row(setting: Setting | None, knob: Knob, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A policy with one setting in one cell: what it was set to, and the means of its runs."""
    return {
        "target": knob.target,
        "smallest": setting.smallest if setting else None,
        "replicas": knob.replicas,
        "seeds": len(runs),
    } | means({name: [one[name] for one in runs] for name in FIGURES})


def valve_row(
    lowered: Sequence[dict[str, Any]], unlowered: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What lower thresholds brought: differences between runs with equal requests and replicas."""
    pairs = list(zip(lowered, unlowered, strict=True))
    return means(
        {
            "kept": [float(one["in_time"] - other["in_time"]) for one, other in pairs],
            "kept_share": [one["attainment"] - other["attainment"] for one, other in pairs],
            "points_lost": [one["points_lost"] for one, _ in pairs],
            "below_set_point_s": [one["below_set_point_s"] for one, _ in pairs],
        }
    )
