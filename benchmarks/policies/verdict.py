"""What the comparison says of our policy as it ships, and whether that is what was wanted of it.

A policy attains in a cell if on average over seeds the wanted share of requests is in time. Cheap
is worth nothing without that, so costs are compared where both attain, and the other cells are
counted beside them.
"""

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

from policies.contenders import FIXED, OURS, UNLOWERED
from policies.job import ComparisonJob

# What is wanted: attained in so many of the cells in which others do; replicas over those of the
# best fixed fleet.
_SHARE, _OVER_FIXED = 0.9, 1.25
_RAY = ("ray", "ray-verified")
_HINDSIGHT = "hindsight"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim. `holds` is None where nothing was promised, and the number is what is told."""

    claim: str
    measured: str
    holds: bool | None


def claims(cells: list[Row], job: ComparisonJob) -> dict[str, Any]:
    """What follows from the cells, as JSON values; empty if our policy was not run."""
    if OURS not in job.policies:
        return {}
    wanted = {regime: slo.attainment for regime, slo in job.slos.items()}
    views = [_View(cell, wanted[cell["regime"]]) for cell in cells]
    return {
        "attained": _attained(views),
        "over_best_fixed": _over_best_fixed(views),
        "dominated": {
            policy: [view.name for view in views if view.dominated_by(policy)] for policy in FIXED
        },
        "over_ray": {
            f"{policy}, {group}": _over(views, policy, group)
            for policy in _RAY
            for group in ("default", "tuned")
            if any(view.row(policy, group) for view in views)
        },
        "valve": _valve([cell["valve"] for cell in cells if "valve" in cell]),
    }


def verdicts(result: dict[str, Any]) -> list[Verdict]:
    """The claims as sentences."""
    found = result["claims"]
    if not found:
        return []
    return [
        *_attained_verdicts(found["attained"]),
        *_fixed_verdicts(found["over_best_fixed"]),
        *[_dominated_verdict(policy, by) for policy, by in found["dominated"].items()],
        *[_ray_verdict(name, over) for name, over in found["over_ray"].items()],
        *_valve_verdicts(found["valve"]),
    ]


def percent(share: float) -> str:
    """A share as a percentage with all its digits: 99.9% must not become 100%."""
    return f"{100 * share:g}%"


def margin(half_width: float | None) -> str:
    """The ± after a mean; empty if its interval is not known, as with one seed."""
    return "" if half_width is None else f" ± {half_width:.2f}"


def best_fixed(cell: Row) -> float | None:
    """Replica-seconds of the cheapest fixed fleet known in hindsight; None if none attains."""
    known = [cell["policies"].get(policy, {}).get(_HINDSIGHT) for policy in FIXED]
    return min((row["mean"]["replica_s"] for row in known if row), default=None)


@dataclass(frozen=True, slots=True)
class _View:
    """A cell, seen from our policy as it ships."""

    cell: Row
    wanted: float

    @property
    def name(self) -> str:
        cell = self.cell
        return f"{cell['trace']}, {cell['regime']}, {cell['cold_start_s']:g} s"

    @property
    def ours(self) -> Row:
        return self.cell["policies"][OURS]["default"]

    def row(self, policy: str, group: str) -> Row | None:
        return self.cell["policies"].get(policy, {}).get(group)

    def attains(self, row: Row | None) -> bool:
        return row is not None and row["mean"]["attainment"] >= self.wanted

    def attained_by(self) -> list[str]:
        """Others that attain and know at most what the trace needs on average."""
        return [
            f"{policy}, {group}"
            for policy, groups in self.cell["policies"].items()
            for group, row in groups.items()
            if policy not in (OURS, UNLOWERED) and group != _HINDSIGHT and self.attains(row)
        ]

    def over_best_fixed(self) -> float | None:
        """Our replica-seconds over those of the cheapest fixed fleet with hindsight."""
        best = best_fixed(self.cell)
        return None if best is None else self.ours["mean"]["replica_s"] / best

    def dominated_by(self, policy: str) -> bool:
        """Whether the fixed fleet of twice the mean need is at least as good in all, and better in
        one. In time are all who attain alike."""
        other = self.row(policy, "default")
        if other is None:
            return False
        theirs, ours = other["mean"], self.ours["mean"]
        late = [0.0 if self.attains(r) else 1 - r["mean"]["attainment"] for r in (other, self.ours)]
        pairs = [
            (theirs["replica_s"], ours["replica_s"]),
            (theirs["points_lost"], ours["points_lost"]),
            (late[0], late[1]),
        ]
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _attained(views: list[_View]) -> dict[str, Any]:
    by = {view.name: view.attained_by() for view in views}
    ours = {view.name for view in views if view.attains(view.ours)}
    many = sum(bool(others) for others in by.values())
    both = sum(bool(others) and name in ours for name, others in by.items())
    return {
        "cells": len(views),
        "by_others": many,
        "by_both": both,
        "share": both / many if many else None,
        "by_ours_alone": [name for name in ours if not by[name]],
        "missed": {name: others for name, others in by.items() if others and name not in ours},
        "others": dict(Counter(one for others in by.values() for one in others).most_common()),
    }


def _over_best_fixed(views: list[_View]) -> dict[str, Any]:
    known = [(view, over) for view in views if (over := view.over_best_fixed())]
    ratios = {view.name: round(over, 4) for view, over in known if view.attains(view.ours)}
    varying = [view.name for view, _ in known if view.cell["varies"]]
    values = sorted(ratios.values())
    return {
        "cells": len(known),
        "ratios": ratios,
        "mean": statistics.fmean(values) if values else None,
        "quartiles": statistics.quantiles(values, n=4) if len(values) > 1 else None,
        "varying": varying,
        "varying_below": [name for name in varying if ratios.get(name, 2) < 1],
    }


def _over(views: list[_View], policy: str, group: str) -> dict[str, Any]:
    """Our replica-seconds over another policy's, in cells where both attain."""
    names = {(True, True): "both", (True, False): "ours", (False, True): "theirs"}
    counts, ratios = Counter[str](), []
    for view in views:
        other = view.row(policy, group)
        who = names.get((view.attains(view.ours), view.attains(other)), "none")
        counts[who] += 1
        if other and who == "both":
            ratios.append(view.ours["mean"]["replica_s"] / other["mean"]["replica_s"])
    return {
        "ratio": statistics.geometric_mean(ratios) if ratios else None,
        "least": min(ratios, default=None),
        "most": max(ratios, default=None),
        **{name: counts[name] for name in ("both", "ours", "theirs", "none")},
    }


def _valve(rows: list[Row]) -> dict[str, float] | None:
    """Requests kept in time by lower thresholds over all cells, of which most may have none."""
    if not rows:
        return None
    return {
        "cells": len(rows),
        "requests_kept": sum(row["mean"]["kept"] for row in rows),
        "points_lost": statistics.fmean(row["mean"]["points_lost"] for row in rows),
        "below_set_point_s": statistics.fmean(row["mean"]["below_set_point_s"] for row in rows),
    }


def _attained_verdicts(found: dict[str, Any]) -> list[Verdict]:
    cells, both = found["by_others"], found["by_both"]
    names = ", ".join(f"{name} {count}" for name, count in list(found["others"].items())[:3])
    return [
        Verdict(
            f"attains in {percent(_SHARE)} of the cells in which another policy does that knows "
            "only the past, or what is needed on average",
            f"{both} of {cells}, of {found['cells']} in all; {len(found['by_ours_alone'])} more "
            f"that no other attains (most often attained by: {names or 'none'})",
            bool(cells) and both >= _SHARE * cells,
        )
    ]


def _fixed_verdicts(found: dict[str, Any]) -> list[Verdict]:
    mean, ratios = found["mean"], found["ratios"]
    if mean is None:
        return []
    below, varying = len(found["varying_below"]), len(found["varying"])
    within = sum(value <= _OVER_FIXED for value in ratios.values())
    quartiles = found["quartiles"]
    spread = f", quartiles {' '.join(f'{q:.2f}' for q in quartiles)}" if quartiles else ""
    return [
        Verdict(
            f"mean replicas at most {_OVER_FIXED:g} times those of the best fixed fleet known in "
            "hindsight",
            f"{mean:.2f} times{spread}; at most {_OVER_FIXED:g} times in {within} of "
            f"{len(ratios)} cells where both attain",
            mean <= _OVER_FIXED,
        ),
        Verdict(
            "fewer than that fleet wherever load varies by more than half within an hour",
            f"in {below} of {varying} such cells",
            below == varying,
        ),
    ]


def _dominated_verdict(policy: str, by: list[str]) -> Verdict:
    measured = f"in {len(by)} cells" + (f": {'; '.join(by[:6])}" if by else "")
    return Verdict(f"dominated nowhere by `{policy}` of twice the mean need", measured, not by)


def _ray_verdict(name: str, over: dict[str, Any]) -> Verdict:
    measured = "nowhere both"
    if over["ratio"] is not None:
        least, most = percent(round(over["least"], 2)), percent(round(over["most"], 2))
        measured = f"{over['ratio']:.0%} ({least} to {most}) in {over['both']} cells"
    return Verdict(
        f"replica-seconds as a share of those of {name}, where both attain",
        f"{measured}; ours alone attains in {over['ours']}, theirs alone in {over['theirs']}, "
        f"neither in {over['none']}",
        None,
    )


def _valve_verdicts(valve: dict[str, float] | None) -> list[Verdict]:
    if valve is None:
        return []
    measured = (
        f"{valve['requests_kept']:,.0f} in {valve['cells']} cells, for {valve['points_lost']:.2f} "
        f"points and {valve['below_set_point_s']:.0f} s of lower thresholds a cell"
    )
    return [Verdict("requests kept in time by lower thresholds, on equal replicas", measured, None)]
