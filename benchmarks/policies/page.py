"""The comparison as a self-contained page, and as JSON."""

import json
from html import escape
from pathlib import Path
from typing import Any

from mars_ray import page as pages
from mars_ray.simulator.report import policy_rows, timelines
from policies.plots import cell_map
from policies.verdict import best_fixed, margin, percent, verdicts

RESULT_FILE = "result.json"
# What the tables of cells need beside the style of all reports; the shades of cells are light ones.
_STYLE = """
:root { color-scheme: light }
body { max-width: 84rem } p { max-width: 62rem }
h2 { border-top: 1px solid #8884; padding-top: 1rem }
th { vertical-align: bottom }
table.text th, table.text td { text-align: left; vertical-align: top; max-width: 34rem }
tr.mars { font-weight: 600 }
table.map { font-size: 10px; font-variant-numeric: tabular-nums }
table.map th, table.map td { padding: 1px 2px; border: 1px solid #fff; text-align: center;
  white-space: nowrap; min-width: 20px; font-weight: inherit }
table.map th.trace { border-left: 2px solid #666; font-weight: 600; max-width: 6.2rem;
  overflow: hidden; text-overflow: ellipsis }
table.map th.regime { border-left: 1px solid #999 } table.map tr > th:first-child,
table.map td.group { text-align: left; padding-right: 6px; font-size: 12px }
td.missed { background: #e4e4e4; color: #a33 } td.alone { background: #b7e0c8 }
td.yes { color: #00704f } td.no { color: #b03000 } details { font-size: 13px }
"""
_HOLDS = {True: ("yes", "yes"), False: ("no", "no"), None: ("", "-")}


def write_report(result: dict[str, Any], folder: Path) -> None:
    """Write `report.html` and `result.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).write_text(json.dumps(result) + "\n")
    (folder / "report.html").write_text(page(result), "utf-8")


def page(result: dict[str, Any]) -> str:
    """The comparison as HTML."""
    title = result["job"]["name"]
    parts = [
        _head(result),
        _verdicts(result),
        f"<h2>Over all cells</h2>{_policies(result)}",
        f"<h2>Cell by cell</h2>{_map(result)}",
        _valves(result),
        f"<h2>What a cell needs</h2>{_cells(result)}",
        *_timelines(result),
        _foot(result),
    ]
    return pages.page(title, [("html", part) for part in parts], _STYLE)


def _head(result: dict[str, Any]) -> str:
    job = result["job"]
    regimes = "; ".join(
        f"{escape(name)}: first token in {slo['ttft_s']:g} s, "
        f"{1e3 * slo['time_per_token_s']:g} ms a token, {percent(slo['attainment'])} of requests"
        for name, slo in job["slos"].items()
    )
    fewer = [
        f"{escape(trace)} {_seeds(len(special['seeds']))}"
        for trace, special in job["per_trace"].items()
        if special["seeds"]
    ]
    seeds = _seeds(len(job["seeds"])) + (f" (but {', '.join(fewer)})" if fewer else "")
    tuned = (
        " <i>default</i> is what a project ships; <i>tuned</i> what attains in the most cells "
        "of the <i>other</i> traces in the same regime, at the last cold start, and of "
        "those the cheapest"
        + (f" (judged with {_seeds(few)})" if (few := job.get("tuned_seeds")) else "")
        + "; <i>hindsight</i> knows the very trace."
        if job["tune"]
        else ""
    )
    return (
        "<p>Scaling policies on a virtual clock, in cells of a trace, a regime and a cold start. "
        f"Service model: {escape(result['model']['name'])}. Regimes: {regimes}. Means over "
        f"{seeds}. All fleets begin warm with what their first two minutes need and a half more, "
        f"and have at most {job['scaling']['max_replicas']} replicas.{tuned}</p>"
    )


def _seeds(count: int) -> str:
    return f"{count} seed" if count == 1 else f"{count} seeds"


def _verdicts(result: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(one.claim)}<td>{escape(one.measured)}"
        f"<td class='{_HOLDS[one.holds][0]}'>{_HOLDS[one.holds][1]}"
        for one in verdicts(result)
    )
    if not rows:
        return ""
    return (
        "<table class=text><tr><th>of <code>mars</code> as it ships<th>measured<th>holds"
        f"{rows}</table>"
    )


def _policies(result: dict[str, Any]) -> str:
    rows = []
    for policy, group, cells, attained, over, points in policy_rows(result):
        shown = f"<td>{over:.2f}<td>{points:.2f}" if attained else "<td>-<td>-"
        kind = "mars" if policy == "mars" else ""
        rows.append(
            f"<tr class='{kind}'><td>{escape(policy)}<td>{escape(group)}<td>{attained} of {cells}"
            f"{shown}"
        )
    return (
        "<table><tr><th>policy<th>settings<th>cells attained<th>replicas over the mean need"
        f"<th>points lost{''.join(rows)}</table><p class=facts>Replicas over what lossless "
        "decoding needs on average, in the cells that a policy attains: not the same for all.</p>"
    )


def _map(result: dict[str, Any]) -> str:
    wanted = {name: slo["attainment"] for name, slo in result["job"]["slos"].items()}
    return (
        "<p>Numbers are replica-seconds over those of the cheapest fixed fleet known in "
        "hindsight. Grey cells miss the objective, with the share in time; a tick attains where no "
        "fixed fleet does. Columns: trace, regime, cold start in seconds.</p>"
        f"<div class=wide>{cell_map(result['cells'], wanted)}</div>"
    )


def _valves(result: dict[str, Any]) -> str:
    cells = [cell for cell in result["cells"] if "valve" in cell]
    if not cells:
        return ""
    rows = []
    for cell in cells:
        mean, half = cell["valve"]["mean"], cell["valve"]["half_width"]
        rows.append(
            f"<tr><td>{escape(cell['trace'])}<td>{escape(cell['regime'])}"
            f"<td>{cell['cold_start_s']:g}<td>{mean['kept']:.0f}{margin(half['kept'])}"
            f"<td>{mean['kept_share']:.2%}<td>{mean['points_lost']:.2f}"
            f"{margin(half['points_lost'])}<td>{mean['below_set_point_s']:.0f}"
        )
    return (
        "<h2>What lower thresholds kept</h2><p>Requests that were in time with lower thresholds, "
        "and late without, on the same replicas at the same times; 95% intervals over seeds.</p>"
        "<table><tr><th>trace<th>regime<th>cold start, s<th>kept in time<th>of all<th>points lost"
        f"<th>lowered, s{''.join(rows)}</table>"
    )


def _cells(result: dict[str, Any]) -> str:
    """What does not depend on the cold start."""
    cells = {(cell["trace"], cell["regime"]): cell for cell in result["cells"]}
    rows = []
    for (trace, regime), cell in cells.items():
        best = best_fixed(cell)
        fixed = "-" if best is None else f"{best / cell['duration_s']:.2f}"
        rows.append(
            f"<tr><td>{escape(trace)}<td>{escape(regime)}<td>{cell['requests']:,}"
            f"<td>{cell['duration_s'] / 3600:.1f}<td>{cell['step_rows']:,}<td>{cell['plain']:.2f}"
            f"<td>{cell['lossless']:.2f}<td>{cell['bound']['lossless']:.2f}"
            f"<td>{cell['bound']['any']:.2f}<td>{fixed}<td>{'yes' if cell['varies'] else 'no'}"
        )
    return (
        "<p>Replicas, on average until the last arrival: what plain and lossless decoding would "
        "need if requests came evenly; what no schedule can do without, lossless and at any "
        "threshold; the best fixed fleet known in hindsight. Load varies if within an hour five "
        "minutes have less than half the load of five others.</p>"
        "<table><tr><th>trace<th>regime<th>requests<th>hours<th>rows of a step<th>plain<th>lossless"
        "<th>bound, lossless<th>bound<th>best fixed"
        f"<th>varies{''.join(rows)}</table>"
    )


def _timelines(result: dict[str, Any]) -> list[str]:
    return [
        f"<h2>{escape(trace)}, {escape(part['regime'])}, cold start {part['cold_start_s']:g} s</h2>"
        f"{timelines(part['lines'])}"
        for trace, part in result["timelines"].items()
        if part["lines"]
    ]


def _foot(result: dict[str, Any]) -> str:
    facts, cost = result["provenance"], result["cost"]
    return (
        f"<p class=facts>{cost['runs']:,} runs, {cost['cpu_s'] / 3600:.1f} processor hours. "
        f"mars-ray {facts['mars_ray']}, commit {facts['commit']}. Service model: "
        f"{escape(json.dumps(result['model']['provenance']))}.</p>"
        f"<details><summary>The job</summary><pre>{escape(json.dumps(result['job'], indent=1))}"
        "</pre></details>"
    )
