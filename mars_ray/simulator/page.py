"""The comparison as a self-contained page, and as JSON."""

import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from mars_ray.simulator.plots import pareto, sensitivity, timelines
from mars_ray.simulator.verdict import percent, verdicts

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #222 }
h1 { font-size: 1.6rem } h2 { font-size: 1.25rem; margin-top: 2.5rem; border-top: 1px solid #ddd;
  padding-top: 1rem }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid #eee }
th { border-bottom: 1px solid #999; vertical-align: bottom }
th:first-child, td:first-child { text-align: left }
table.text th, table.text td { text-align: left }
tr.mars { font-weight: 600; background: #fdf3ec } tr.missed td { color: #999 }
svg { max-width: 100%; height: auto } .facts { color: #555; font-size: 13px }
td.yes { color: #00704f } td.no { color: #b03000 } details { font-size: 13px }
"""
_COLUMNS = (
    ("replica-hours", "replica_s", lambda v: f"{v / 3600:.2f}"),
    ("mean replicas", "mean_replicas", lambda v: f"{v:.2f}"),
    ("in time", "attainment", lambda v: f"{v:.2%}"),
    ("effective accuracy", "effective_accuracy", lambda v: f"{v:.2f}"),
    ("points lost", "points_lost", lambda v: f"{v:.2f}"),
    ("TTFT p90, s", "ttft_p90_s", lambda v: f"{v:.2f}"),
    ("TTFT p99, s", "ttft_p99_s", lambda v: f"{v:.2f}"),
    ("per token p90, ms", "time_per_token_p90_s", lambda v: f"{1e3 * v:.1f}"),
    ("per token p99, ms", "time_per_token_p99_s", lambda v: f"{1e3 * v:.1f}"),
    ("below set-point, s", "below_set_point_s", lambda v: f"{v:.0f}"),
    ("refused", "shed", lambda v: f"{v:.0f}"),
    ("failed", "failed", lambda v: f"{v:.0f}"),
)


def write_report(result: dict[str, Any], folder: Path) -> None:
    """Write `report.html` and `result.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result) + "\n")
    (folder / "report.html").write_text(page(result), "utf-8")


def page(result: dict[str, Any]) -> str:
    """The comparison as HTML."""
    job = result["job"]
    cold = f"{job['cluster']['cold_start_s']:g}"
    traces = result["cold_starts"][cold]
    parts = [_head(result, cold), _verdict_table(result)]
    for name, part in traces.items():
        parts += [f"<h2>{escape(name)}</h2>", _trace_section(part, job)]
    if len(result["cold_starts"]) > 1:
        parts.append("<h2>By cold start</h2>")
        for name in traces:
            parts += [f"<h3>{escape(name)}</h3>", sensitivity(result["cold_starts"], name)]
    parts.append(_foot(result))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(job['name'])}</title>"
        f"<style>{_STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _head(result: dict[str, Any], cold: str) -> str:
    job = result["job"]
    slo, prices = job["scaling"]["slo"], job["scaling"]["prices"]
    seeds = len(job["seeds"])
    intervals = "intervals are 95% of the mean" if seeds > 1 else "so no intervals are known"
    tuned = min(job["tuning_seeds"], seeds)
    return (
        f"<h1>{escape(job['name'])}</h1><p>Scaling policies on a virtual clock. Service model: "
        f"{escape(result['model']['name'])}. Objective: first token in {slo['ttft_s']:g} s and "
        f"{1e3 * slo['time_per_token_s']:g} ms a token for {percent(slo['attainment'])} of the "
        f"requests. Cold start {cold} s, {_seeds(seeds)}; {intervals}. "
        f"A replica costs {prices['replica_hour']:g} an hour, a point of accuracy "
        f"{prices['point_hour']:g}. All but static-mean are tuned: the cheapest setting that "
        f"reaches the objective on {_seeds(tuned)}.</p>"
    )


def _seeds(count: int) -> str:
    return f"{count} seed" if count == 1 else f"{count} seeds"


def _verdict_table(result: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(v.trace)}<td>{escape(v.claim)}<td>{escape(v.measured)}"
        f"<td class={'yes' if v.holds else 'no'}>{'yes' if v.holds else 'no'}"
        for v in verdicts(result)
    )
    if not rows:
        return ""
    return f"<table class=text><tr><th>trace<th>wanted of mars<th>measured<th>holds{rows}</table>"


def _trace_section(part: dict[str, Any], job: dict[str, Any]) -> str:
    slo, policies = job["scaling"]["slo"], part["policies"]
    return "".join(
        [
            f"<p class=facts>{part['requests'][0]} requests. Grey rows and hollow marks miss the "
            "objective.</p>",
            _table(policies, slo["attainment"]),
            pareto(policies, slo["attainment"]),
            timelines(policies),
            _log(policies.get("mars")),
        ]
    )


def _table(policies: dict[str, Any], attainment: float) -> str:
    head = "".join(f"<th>{name}" for name, _, _ in _COLUMNS)
    rows = []
    for name, row in policies.items():
        missed = row["mean"]["attainment"] < attainment
        kind = " ".join(k for k, on in (("mars", name == "mars"), ("missed", missed)) if on)
        cells = "".join(
            f"<td{_margin(row['half_width'][key], shown)}>{shown(row['mean'][key])}"
            for _, key, shown in _COLUMNS
        )
        rows.append(f"<tr class='{kind}'><td>{escape(name)}{cells}")
    return f"<table><tr><th>policy{head}{''.join(rows)}</table>"


def _margin(half_width: float | None, shown: Callable[[float], str]) -> str:
    return "" if half_width is None else f" title='± {shown(half_width)}'"


def _log(row: dict[str, Any] | None) -> str:
    if not row or not row["reasons"]:
        return ""
    lines = "".join(f"<tr><td>{at:g} s<td>{escape(why)}" for at, why in row["reasons"])
    return (
        "<details><summary>What mars said (first decisions)</summary>"
        f"<table class=text>{lines}</table></details>"
    )


def _foot(result: dict[str, Any]) -> str:
    facts = result["provenance"]
    return (
        f"<p class=facts>mars-ray {facts['mars_ray']}, commit {facts['commit']}. Service model: "
        f"{escape(json.dumps(result['model']['provenance']))}.</p>"
        f"<details><summary>The job</summary><pre>{escape(json.dumps(result['job'], indent=1))}"
        "</pre></details>"
    )
