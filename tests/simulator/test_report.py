"""`mars-ray simulate` from job to page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from mars_ray.config.load import load_job
from mars_ray.errors import DataError
from mars_ray.simulator import report
from mars_ray.simulator.config import KINDS, SimulateJob

ROOT = Path(__file__).parents[2]
_FLASH = "{type='flash', duration_s=120, from_s=40, to_s=80, base_rps=2, peak_rps=10}"
_STEADY = "{type='ramp', rates_rps=[6], stage_s=120}"
SMALL = (
    "seeds=[0, 1]",
    "policies=['mars', 'fixed-verified', 'ray']",
    f"traces={{flash={_FLASH}, steady={_STEADY}}}",
    "scaling.max_replicas=4",
    "cold_starts_s=[5, 60]",
    "cluster.tick_s=4",
)


def job(*overrides: str) -> SimulateJob:
    made = load_job("jobs/simulate-demo.toml", [*SMALL, *overrides], KINDS)
    assert isinstance(made, SimulateJob)
    return made


@pytest.mark.slow
def test_the_command_prints_a_table_and_one_json_line(tmp_path):
    """Guards output that programs cannot read, a progress bar in a pipe, and a page that needs more
    than itself."""
    command = ["-m", "mars_ray", "simulate", "jobs/simulate-demo.toml", *SMALL]
    command += ["--workers", "1", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (line,) = done.stdout.splitlines()
    cells = json.loads(line)["cells"]
    assert [(cell["trace"], cell["cold_start_s"]) for cell in cells] == [
        ("flash", 5.0),
        ("flash", 60.0),
        ("steady", 5.0),
        ("steady", 60.0),
    ]
    for cell in cells:
        assert list(cell["policies"]) == ["mars", "fixed-verified", "ray"]
        for groups in cell["policies"].values():
            assert groups["default"]["seeds"] == 2
            assert 0 < groups["default"]["mean"]["attainment"] <= 1
    assert "fixed-verified" in done.stderr
    assert "\r" not in done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    html = (tmp_path / "report.html").read_text()
    # Names of clip paths are hashes of sizes whose last digits vary.
    names = re.compile(r"\bp[0-9a-f]{10}\b")
    assert names.sub("", html) == names.sub("", report.report(result))
    assert html.count("<svg") == 2  # a timeline for each trace
    assert not re.search(r"<script|<img|<link|src=|@import", html)
    mean = cells[1]["policies"]["ray"]["default"]["mean"]
    assert f"{mean['mean_replicas']:.2f} ({mean['attainment']:.1%}" in html


def test_what_is_finished_is_not_simulated_again(tmp_path, monkeypatch):
    """With one policy more only its runs are made; the rest comes from the folder."""
    monkeypatch.setattr(report, "provenance", lambda: {"mars_ray": "1", "commit": "abc"})
    console = Console(quiet=True)
    first = report.run_simulations(job("policies=['ray']"), console, tmp_path, 1)
    made = []
    run = report._run
    monkeypatch.setattr(report, "_run", lambda *given: made.append(given[3]) or run(*given))
    more = report.run_simulations(job("policies=['ray', 'fixed']"), console, tmp_path, 1)
    assert set(made) == {"fixed"}
    for one, two in zip(first["cells"], more["cells"], strict=True):
        assert one["policies"]["ray"] == two["policies"]["ray"]


def test_a_missing_trace_is_found_before_anything_runs(monkeypatch):
    """Guards an hour of simulations that ends in a path."""
    made = job("traces.mine={type='file', path='nowhere.csv'}")
    monkeypatch.setattr(report, "run_parts", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(DataError, match=r"nowhere\.csv: no such file"):
        report.run_simulations(made, Console(quiet=True))
