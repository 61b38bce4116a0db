"""mars-ray simulate from job to page."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mars_ray.autoscale.service_model import load_service_model
from mars_ray.config.load import load_job
from mars_ray.errors import ConfigError, DataError
from mars_ray.simulator import comparison
from mars_ray.simulator.config import KINDS, SimulateJob
from mars_ray.simulator.page import page
from mars_ray.simulator.traces.load import load_trace
from mars_ray.simulator.traces.trace import Trace
from mars_ray.simulator.verdict import percent, verdicts

ROOT = Path(__file__).parents[2]
SMALL = (
    "seeds=[0, 1]",
    "policies=['mars', 'static-peak', 'ray']",
    "traces={flash={type='flash', duration_s=200, from_s=60, to_s=120}}",
    "scaling.max_replicas=4",
    "cold_starts_s=[5]",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of one run by the command line, with what it said."""
    path = tmp_path_factory.mktemp("simulate")
    command = ["-m", "mars_ray", "simulate", "jobs/simulate-fast.toml", *SMALL, "--output", path]
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (path / "stdout").write_text(done.stdout)
    (path / "stderr").write_text(done.stderr)
    return path


@pytest.mark.slow
def test_the_command_prints_a_table_and_one_json_line(folder):
    """Guards output that programs cannot read, and a progress bar in a pipe."""
    lines = (folder / "stdout").read_text().splitlines()
    summary = json.loads(lines[-1])
    row = summary["cold_starts"]["100"]["flash"]["mars"]
    assert 0 < row["mean"]["attainment"] <= 1
    assert len(lines) == 1
    table = (folder / "stderr").read_text()
    assert "static-peak" in table
    assert "\r" not in table


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("scaling.quality_classes={gold=0.9}", "pinned_threshold"),
        ("cluster.tick_s=20", "stale_after_s=15 has policies ignore"),
        ("cluster.metrics_lag_s=15.5", "metrics are 16 s old"),
        ("cold_starts_s=[100.00001]", "first six digits"),
        ("traces={flash={type='flash', rate_factor=2}}", "set spread_s"),
    ],
)
def test_what_would_do_nothing_or_something_else_is_refused(setting, message):
    """Guards comparisons of hours in which a policy held still, or of loads that nobody has."""
    with pytest.raises(ConfigError, match=message):
        load_job("jobs/simulate-fast.toml", [*SMALL, setting], KINDS)


def test_the_page_needs_nothing_else(folder):
    """One file: no script, no image, no address but the SVG's own names."""
    html = (folder / "report.html").read_text()
    result = json.loads((folder / "result.json").read_text())
    assert html == page(result)
    assert html.count("<svg") == 3  # trade-off, timelines, cold starts
    for outside in ("<script", "<img", "<link", "src=", "@import"):
        assert outside not in html
    assert set(result["cold_starts"]) == {"100", "5"}
    assert len(result["cold_starts"]["100"]["flash"]["policies"]["ray"]["runs"]) == 2


def test_a_page_of_none_but_late_policies(folder):
    """Guards a run of minutes that is lost when its picture is drawn."""
    result = json.loads((folder / "result.json").read_text())
    for part in result["cold_starts"].values():
        for row in part["flash"]["policies"].values():
            row["mean"]["attainment"] = 0.5
    assert page(result).count("<svg") == 3


@pytest.mark.parametrize(
    ("seeds", "quantile"), [(2, 12.706), (10, 2.262), (11, 2.228), (21, 2.086), (61, 2.000)]
)
def test_an_interval_is_students(seeds, quantile):
    """Guards intervals that are narrower than what is known, and jump where a table ends."""
    values = [float(i % 2) for i in range(seeds)]
    expected = quantile * np.std(values, ddof=1) / seeds**0.5
    assert comparison._half_width(values) == pytest.approx(expected, rel=0.002)


def test_one_seed_tells_no_interval(folder):
    """Guards "± 0.00" where nothing is known, in table, page and JSON."""
    assert comparison._half_width([1.0]) is None
    assert comparison._half_width([1.0, float("inf")]) is None
    result = json.loads((folder / "result.json").read_text())
    result["job"]["seeds"] = [0]
    for traces in result["cold_starts"].values():
        for row in traces["flash"]["policies"].values():
            row["half_width"] = dict.fromkeys(row["half_width"])
    console = Console(file=io.StringIO(), width=200)
    comparison.print_comparison(result, console)
    html = page(result)
    assert isinstance(console.file, io.StringIO)
    assert "static-peak" in console.file.getvalue()
    assert "±" not in console.file.getvalue() + html.partition("<details>")[0]
    assert "1 seed; so no intervals are known" in html
    assert "reaches the objective on 1 seed." in html


def test_a_share_keeps_its_digits():
    """Guards "at least 100% in time | 99.93% | yes"."""
    assert [percent(share) for share in (0.9, 0.995, 0.999, 0.9995)] == [
        "90%",
        "99.5%",
        "99.9%",
        "99.95%",
    ]


def test_a_fixed_threshold_is_one_that_the_model_has():
    """Guards a policy that is another one, to the last digit, under its own name."""
    model = "service_model='jobs/models/demo-cpu.json'"
    job = load_job(
        "jobs/simulate-fast.toml", [*SMALL, model, "policies=['fixed-threshold']"], KINDS
    )
    assert isinstance(job, SimulateJob)
    with pytest.raises(
        ConfigError, match=r"no level 0.95 .*: set fixed_threshold to one of 1, 0.5"
    ):
        comparison.run_simulations(job, Console(quiet=True))
    comparison._check_fixed_threshold(
        job.model_copy(update={"fixed_threshold": 0.5}), load_service_model(job.service_model)
    )


def test_verdicts_by_hand():
    """Ratios against the right rivals, and dominance."""

    def row(replica_s: float, accuracy: float, attainment: float = 1.0) -> dict:
        mean = {"replica_s": replica_s, "effective_accuracy": accuracy, "attainment": attainment}
        return {"mean": mean}

    policies = {
        "mars": row(50, 99.5),
        "ray": row(100, 100),
        "lossless": row(60, 100),
        "ray-verified": row(40, 98, attainment=0.9),
        "static-peak": row(50, 99.6),
        "clairvoyant": row(40, 100),
    }
    job = {"cluster": {"cold_start_s": 100.0}, "scaling": {"slo": {"attainment": 0.99}}}
    result = {"job": job, "cold_starts": {"100": {"t": {"policies": policies}}}}
    found = {verdict.claim.split(" of ")[-1]: verdict for verdict in verdicts(result)}
    assert [v.holds for v in verdicts(result)] == [True, True, True, False, False]
    assert "by static-peak" in [v.measured for v in verdicts(result)]
    assert any("83% of lossless" in verdict.measured for verdict in found.values())
    policies["mars"]["mean"]["attainment"] = 0.98
    assert not any(verdict.holds for verdict in verdicts(result))


def test_what_is_finished_belongs_to_the_trace_as_it_was():
    """Guards results of another trace: every column of every request counts."""
    job = load_job("jobs/simulate-fast.toml", SMALL, KINDS)
    assert isinstance(job, SimulateJob)
    model = load_service_model(job.service_model)
    where = {"mars_ray": "1", "commit": "abc"}
    trace = load_trace(job.traces["flash"], 0)
    others = [
        replace(trace, prompt_tokens=trace.prompt_tokens + 1),
        replace(trace, pinned_threshold=np.ones(len(trace))),
        replace(trace, deadline_s=np.ones(len(trace))),
        replace(trace, output_tokens=trace.output_tokens[::-1]),
    ]

    def work(one: Trace, where: dict[str, str]) -> str:
        return comparison._work(job, model, [one], where)

    assert work(trace, where) == work(load_trace(job.traces["flash"], 0), where)
    assert len({work(one, where) for one in [trace, *others]}) == 5
    changed = where | {"commit": "abc+"}
    assert work(trace, changed) != work(trace, changed)


def test_a_missing_trace_is_found_before_anything_runs(monkeypatch):
    """Guards an hour of simulations that ends in a path."""
    job = load_job("jobs/simulate-fast.toml", ["traces.servegen.rates_path=nowhere.csv"], KINDS)
    assert isinstance(job, SimulateJob)
    monkeypatch.setattr(comparison, "_settings", lambda *_: pytest.fail("too late"))
    with pytest.raises(DataError, match=r"nowhere\.csv: no such file"):
        comparison.run_simulations(job, Console(quiet=True))
