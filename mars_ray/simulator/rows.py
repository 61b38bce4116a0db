"""Means over seeds, with their intervals."""

import statistics
from collections.abc import Sequence
from math import isfinite, sqrt
from typing import Any

from mars_ray.simulator.baselines.contenders import Knob, Setting
from mars_ray.simulator.runs import FIGURES

# 97.5% quantiles of Student's t by degrees of freedom; beyond the table, from the normal quantile.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_NORMAL = 1.959964


def made_row(setting: Setting | None, knob: Knob, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A policy with one setting in one cell: what it was set to, and the means of its runs."""
    return {
        "target": knob.target,
        "smallest": setting.smallest if setting else None,
        "replicas": knob.replicas,
        "seeds": len(runs),
    } | _means({name: [one[name] for one in runs] for name in FIGURES})


def valve_row(
    lowered: Sequence[dict[str, Any]], unlowered: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What lower thresholds brought: differences between runs with equal requests and replicas."""
    pairs = list(zip(lowered, unlowered, strict=True))
    return _means(
        {
            "kept": [float(one["in_time"] - other["in_time"]) for one, other in pairs],
            "kept_share": [one["attainment"] - other["attainment"] for one, other in pairs],
            "points_lost": [one["points_lost"] for one, _ in pairs],
            "below_set_point_s": [one["below_set_point_s"] for one, _ in pairs],
        }
    )


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95% interval over seeds; None if it is not known."""
    if len(values) < 2 or not all(map(isfinite, values)):
        return None
    return _quantile(len(values) - 1) * statistics.stdev(values) / sqrt(len(values))


def _means(columns: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "mean": {name: _short(statistics.fmean(values)) for name, values in columns.items()},
        "half_width": {name: _short(half_width(values)) for name, values in columns.items()},
    }


def _short(value: float | None) -> float | None:
    """Six digits, which keep a result of thousands of rows small."""
    return None if value is None else float(f"{value:.6g}")


def _quantile(degrees: int) -> float:
    """Student's 97.5% quantile, by Cornish and Fisher's expansion beyond the table (to 0.2%)."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    z = _NORMAL
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / degrees + second / degrees**2
