"""The comparison of policies from job to page."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from policies import comparison
from policies.contenders import Knob, Setting, shipped
from policies.job import KINDS, ComparisonJob
from policies.page import page
from policies.printed import print_comparison
from policies.runs import Run, figures
from policies.verdict import percent
from rich.console import Console

from mars_ray.autoscale.service_model import load_service_model
from mars_ray.config.load import load_job
from mars_ray.errors import ConfigError, DataError
from mars_ray.simulator import cases, report
from mars_ray.simulator.config import SimulateJob
from mars_ray.simulator.report import half_width
from mars_ray.simulator.traces.trace import Trace

ROOT = Path(__file__).parents[2]
_FLASH = "{type='flash', duration_s=120, from_s=40, to_s=80, base_rps=2, peak_rps=10}"
_STEADY = "{type='ramp', rates_rps=[6], stage_s=120}"
SMALL = (
    "seeds=[0, 1]",
    "policies=['mars', 'mars-lossless', 'fixed-verified', 'ray', 'keda']",
    f"traces={{flash={_FLASH}, steady={_STEADY}}}",
    "scaling.max_replicas=4",
    "cold_starts_s=[5, 60]",
    "cluster.tick_s=4",
    "tuned_seeds=1",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of one run by the command line, with what it said."""
    path = tmp_path_factory.mktemp("simulate")
    command = ["benchmarks/compare_policies.py", "jobs/simulate-demo.toml", *SMALL]
    command += ["--workers", 1, "--output", path]
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (path / "stdout").write_text(done.stdout)
    (path / "stderr").write_text(done.stderr)
    return path


@pytest.fixture
def result(folder: Path) -> dict[str, Any]:
    """Its result, anew for each test."""
    return json.loads((folder / "result.json").read_text())


def job(*overrides: str) -> ComparisonJob:
    made = load_job("jobs/simulate-demo.toml", [*SMALL, *overrides], KINDS)
    assert isinstance(made, ComparisonJob)
    return made


@pytest.mark.slow
def test_the_command_prints_a_table_and_one_json_line(folder):
    """Guards output that programs cannot read, and a progress bar in a pipe."""
    (line,) = (folder / "stdout").read_text().splitlines()
    cell = json.loads(line)["cells"][0]
    assert 0 < cell["policies"]["mars"]["default"]["mean"]["attainment"] <= 1
    said = (folder / "stderr").read_text()
    assert "runs, about" in said
    assert "fixed-verified" in said
    assert "\r" not in said


def test_every_policy_has_every_group_in_every_cell(result):
    """Two traces, one regime, two cold starts; tuned settings are judged with fewer seeds."""
    assert len(result["cells"]) == 4
    for cell in result["cells"]:
        groups = {name: set(rows) for name, rows in cell["policies"].items()}
        assert groups["mars"] == groups["ray"] == groups["keda"] == {"default", "tuned"}
        assert groups["mars-lossless"] == {"default"}
        assert groups["fixed-verified"] >= {"default", "1.5x", "tuned"}
        rows = [row for rows in cell["policies"].values() for row in rows.values()]
        for policy, by_group in cell["policies"].items():
            for group, row in by_group.items():
                setting = Setting(row["target"], row["smallest"] or 0.0)
                few = group == "tuned" and setting not in shipped(policy).values()
                assert row["seeds"] == (1 if few else 2)
        assert all(0 <= row["mean"]["attainment"] <= 1 for row in rows)
        assert cell["bound"]["any"] <= cell["bound"]["lossless"]
        assert set(cell["valve"]["mean"]) >= {"kept", "points_lost"}


def test_no_run_is_made_twice(folder, result):
    """Guards hours spent on settings that are the same on a trace, and on fixed fleets that cannot
    know how long others would take to start."""
    names = [json.loads(line)[1] for line in (folder / "parts.jsonl").read_text().splitlines()]
    assert len(set(names)) == len(names)
    fixed = [name for name in names if "fixed-verified" in name and "timeline" not in name]
    assert fixed
    assert not [name for name in fixed if "cold start 60" in name]
    first, other = (
        [c for c in result["cells"] if c["cold_start_s"] == cold] for cold in (5.0, 60.0)
    )
    for one, two in zip(first, other, strict=True):
        known = one["policies"]["fixed-verified"], two["policies"]["fixed-verified"]
        assert known[0]["default"] == known[1]["default"]


def test_hindsight_is_the_smallest_fleet_that_attains(result):
    """One replica fewer misses on average over the seeds."""
    wanted = job().slos["6 ms"].attainment
    known = [
        (cell, cell["policies"]["fixed-verified"]["hindsight"])
        for cell in result["cells"]
        if "hindsight" in cell["policies"]["fixed-verified"]
    ]
    assert known
    for cell, row in known:
        assert row["mean"]["attainment"] >= wanted
        if row["replicas"] > 1:
            where = cases.Cell(cell["trace"], cell["regime"], 5.0)
            made = job()
            model = load_service_model(made.service_model)
            fewer = Knob(None, row["replicas"] - 1)
            runs = [
                figures(Run(where, "fixed-verified", fewer, seed), made, model) for seed in (0, 1)
            ]
            assert np.mean([run["attainment"] for run in runs]) < wanted


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("scaling.quality_classes={gold=0.9}", "pinned_threshold"),
        ("scaling.slo={ttft_s=3}", "name the regimes in slos"),
        ("cluster.tick_s=20", "stale_after_s=15 has policies ignore"),
        ("per_trace={flash={tick_s=20}}", "metrics of flash are 20 s"),
        ("per_trace={other={tick_s=2}}", "traces has no other"),
        ("cluster.metrics_lag_s=15.5", "are 16 s old"),
        ("cold_starts_s=[100.00001, 100]", "first six digits"),
    ],
)
def test_what_would_do_nothing_or_something_else_is_refused(setting, message):
    """Guards comparisons of hours in which a policy held still, or of loads that nobody has."""
    with pytest.raises(ConfigError, match=message):
        job(setting)


def test_a_trace_may_have_a_cluster_and_seeds_of_its_own():
    """Kills and ticks of one trace, and nothing of them in the others."""
    made = job("per_trace={flash={kills=[{at_s=9}], tick_s=5, seeds=[3]}}")
    assert made.cluster_of("flash", 7).kills[0].at_s == 9
    assert (made.cluster_of("flash", 7).tick_s, made.cluster_of("steady", 7).tick_s) == (5, 4)
    assert not made.cluster_of("steady", 7).kills
    assert (made.seeds_of("flash"), made.seeds_of("steady")) == ((3,), (0, 1))


def test_the_page_needs_nothing_else(folder, result):
    """One file: no script, no image, no address but the SVG's own names."""
    html = (folder / "report.html").read_text()
    # Names of clip paths are hashes of sizes whose last digits vary.
    names = re.compile(r"\bp[0-9a-f]{10}\b")
    assert names.sub("", html) == names.sub("", page(result))
    assert html.count("<svg") == 2  # a timeline for each trace
    for outside in ("<script", "<img", "<link", "src=", "@import"):
        assert outside not in html
    for cell in result["cells"]:
        assert f"<th colspan=2 class='trace'>{cell['trace']}" in html


def test_a_page_of_none_but_late_policies(result):
    """Guards a run of hours that is lost when its picture is drawn."""
    for cell in result["cells"]:
        for groups in cell["policies"].values():
            groups.pop("hindsight", None)
            for row in groups.values():
                row["mean"]["attainment"] = 0.5
    assert page(result).count("50%") >= 4


@pytest.mark.parametrize(
    ("seeds", "quantile"), [(2, 12.706), (10, 2.262), (11, 2.228), (21, 2.086), (61, 2.000)]
)
def test_an_interval_is_students(seeds, quantile):
    """Guards intervals that are narrower than what is known, and jump where a table ends."""
    values = [float(i % 2) for i in range(seeds)]
    expected = quantile * np.std(values, ddof=1) / seeds**0.5
    assert half_width(values) == pytest.approx(expected, rel=0.002)


def test_one_seed_tells_no_interval(result):
    """Guards "± 0.00" where nothing is known, in table, page and JSON."""
    assert half_width([1.0]) is None
    assert half_width([1.0, float("inf")]) is None
    for cell in result["cells"]:
        cell["valve"]["half_width"] = dict.fromkeys(cell["valve"]["half_width"])
    console = Console(file=io.StringIO(), width=200)
    print_comparison(result, console)
    assert isinstance(console.file, io.StringIO)
    assert "kept in time" in console.file.getvalue()
    assert "±" not in console.file.getvalue() + page(result).partition("<details>")[0]


def test_a_share_keeps_its_digits():
    """Guards "at least 100% in time | 99.93% | yes"."""
    assert [percent(share) for share in (0.9, 0.995, 0.999, 0.9995)] == [
        "90%",
        "99.5%",
        "99.9%",
        "99.95%",
    ]


def test_what_is_finished_belongs_to_the_trace_as_it_was(monkeypatch):
    """Guards results of another trace: every column of every request counts."""
    made = job()
    model = load_service_model(made.service_model)
    where = {"mars_ray": "1", "commit": "abc"}
    trace = cases.loaded(made.traces["flash"], 0)
    others = [
        replace(trace, prompt_tokens=trace.prompt_tokens + 1),
        replace(trace, pinned_threshold=np.ones(len(trace))),
        replace(trace, deadline_s=np.ones(len(trace))),
        replace(trace, output_tokens=trace.output_tokens[::-1]),
    ]

    def work(one: Trace, where: dict[str, str]) -> str:
        monkeypatch.setattr(report, "loaded", lambda *_: one)
        return report.work_of(made, model, where, comparison._CHOSEN)

    assert work(trace, where) == work(replace(trace), where)
    assert len({work(one, where) for one in [trace, *others]}) == 5
    changed = where | {"commit": "abc+"}
    assert work(trace, changed) != work(trace, changed)


def test_a_missing_trace_is_found_before_anything_runs(monkeypatch):
    """Guards an hour of simulations that ends in a path."""
    made = job("traces.mine={type='file', path='nowhere.csv'}")
    monkeypatch.setattr(comparison, "run_parts", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(DataError, match=r"nowhere\.csv: no such file"):
        comparison.run_simulations(made, Console(quiet=True))


def test_policies_fare_as_the_command_says(result):
    """Guards two simulators: what policies ship with, here and by `mars-ray simulate`."""
    made = job()
    facts = made.model_dump(exclude={"tune", "tuned_seeds", "policies"})
    policies = ("mars", "fixed-verified", "ray")
    same = SimulateJob.model_validate(facts | {"policies": policies})
    cells = {(c["trace"], c["cold_start_s"]): c for c in result["cells"]}
    for cell in report.run_simulations(same, Console(quiet=True), workers=1)["cells"]:
        other = cells[cell["trace"], cell["cold_start_s"]]
        assert cell["lossless"] == other["lossless"]
        for policy in policies:
            mean = other["policies"][policy]["default"]["mean"]
            assert cell["policies"][policy]["default"]["mean"] == mean


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "policies").glob("*.toml")))
def test_every_job_file_is_a_complete_run(path):
    """Guards a renamed field that a job still uses."""
    made = load_job(path, kinds=KINDS)
    assert ComparisonJob.model_validate_json(made.model_dump_json()) == made
