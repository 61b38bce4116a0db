"""Fleets, verdicts and the page, on a model whose numbers are worked by hand."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from docs.commands import runs
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from simulator.simulated import MODEL
from typer.testing import CliRunner

from mars_ray.advise.advice import (
    Advice,
    Fleets,
    Scaled,
    advise,
    case,
    fleets,
    objectives,
    recommendation,
    report,
    smallest,
    summary,
    verdicts,
    ways,
)
from mars_ray.advise.traffic import Histogram, Measured, draw
from mars_ray.cli import app
from mars_ray.config.scaling import AdviseJob, Slo
from mars_ray.errors import ConfigError
from mars_ray.simulator.engine.run import EXACT
from mars_ray.simulator.traces.trace import Trace

# Two tokens a step of 10 ms: 8 ms a token are kept by `verified` alone.
STRICT, USUAL = Slo(ttft_s=1, time_per_token_s=0.008), Slo(ttft_s=1, time_per_token_s=0.012)


HOUR_S = 120


@pytest.fixture(scope="module", autouse=True)
def _short_hours() -> Iterator[None]:
    """Hours of two minutes, or a simulation would take a minute itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mars_ray.advise.advice.HOUR_S", HOUR_S)
        yield


def trace(*rates: float) -> Trace:
    """Requests a second, by hour; all alike and at even distances."""
    parts = [
        HOUR_S * hour + np.arange(round(HOUR_S * rate)) / rate
        for hour, rate in enumerate(rates)
        if rate
    ]
    arrival_s = np.concatenate(parts)
    return Trace("even", arrival_s, np.full(len(arrival_s), 10), np.full(len(arrival_s), 21))


def write(given: Trace, path: Path) -> Path:
    columns = (given.arrival_s.tolist(), given.prompt_tokens, given.output_tokens)
    rows = [f"{at},{prompt},{output}" for at, prompt, output in zip(*columns, strict=True)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def advice(tmp_path_factory: pytest.TempPathFactory) -> Advice:
    """Of two hours, the second one three times as busy."""
    folder = tmp_path_factory.mktemp("advice")
    MODEL.save(folder / "toy.json")
    job = AdviseJob(
        source=str(write(trace(8.0, 24.0), folder / "even.csv")),
        service_model=str(folder / "toy.json"),
        slos=(STRICT, USUAL),
        cold_start_s=10,
        max_replicas=12,
    )
    return advise(job, Console(quiet=True), workers=1)


@given(st.integers(1, 70), st.integers(-3, 80), st.integers(1, 64))
def test_the_smallest_is_found_from_any_guess(needed: int, guess: int, most: int):
    """In few trials where the guess is near."""
    tried = []

    def enough(size: int) -> bool:
        assert 1 <= size <= most
        tried.append(size)
        return size >= needed

    assert smallest(enough, guess, most) == (needed if needed <= most else None)
    assert len(tried) == len(set(tried))
    if guess == needed <= most:
        assert len(tried) <= 2


def test_ways_of_decoding():
    """The threshold that is named, or the one at the default floor, or the next one below 1."""
    assert [way.name for way in ways(MODEL, None)] == ["plain", "verified", "verified at 0.5"]
    assert [way.name for way in ways(MODEL, 0.9)] == ["plain", "verified"]
    high = replace(MODEL, levels=(MODEL.levels[0], replace(MODEL.levels[1], threshold=0.1)))
    assert ways(high, None)[-1].name == "verified at 0.1"
    # `confidence` has no lossless level but plain decoding.
    paper = replace(MODEL, mode="confidence", levels=(EXACT[0], MODEL.levels[1]))
    assert [way.name for way in ways(paper, None)] == ["plain", "confidence at 0.5"]


def test_objectives_lie_around_the_models_pace():
    """A lone sequence takes 10 ms a token; 250 tokens are more than four prompts."""
    found = objectives(MODEL, trace(1.0))
    assert [slo.time_per_token_s for slo in found] == [0.013, 0.025, 0.05]
    # Rounded after they were multiplied.
    assert [slo.ttft_s for slo in found] == [3.1, 6.2, 12]
    long = trace(1.0)
    long.prompt_tokens[:] = 5000
    assert objectives(MODEL, long)[0].ttft_s > 4 * 0.5


def test_fleets_by_the_hour(advice: Advice):
    """A replica has four places, and an answer takes 0.11 s with two tokens a step, 0.21 s with
    one: 36 and 19 requests a second at most, if they come evenly."""
    strict, usual = advice.objectives
    plain, verified, lower = strict.found.values()
    assert plain.by_hour == [None, None]
    assert plain.fixed is plain.scaled is plain.replica_hours is None
    assert verified.by_hour[0] == 1
    assert verified.by_hour[1] in (1, 2)
    plain, verified, lower = usual.found.values()
    assert plain.by_hour[0] == 1
    assert plain.by_hour[1] in (2, 3)
    assert plain.fixed == plain.by_hour[1]
    assert plain.replica_hours == pytest.approx(sum(plain.by_hour), rel=2e-3)
    assert plain.fixed_attainment >= 0.99
    assert lower.points_lost == 4
    assert lower.scaled.points_lost <= 4
    assert 1 <= plain.scaled.mean_replicas <= 12


def test_an_hour_without_requests_has_one_replica():
    """Guards an empty part of a trace, and a fleet of none that nobody starts again."""
    few = case(trace(1.0, 0.0, 1.0), MODEL, USUAL, 10, 4)
    assert fleets(few, ways(MODEL, None)[0]).by_hour == [1, 1, 1]


def test_a_model_that_is_too_slow_is_not_simulated():
    """No fleet makes a lone sequence faster."""
    slow = case(trace(1.0), MODEL, Slo(ttft_s=1, time_per_token_s=0.002), 10, 4)
    found = fleets(slow, ways(MODEL, None)[1])
    assert (found.capacity_rps, found.fixed, found.by_hour) == (0, None, [None])


def fleet(hours: float | None, points: float = 0.0, scaled: Scaled | None = None) -> Fleets:
    """Over one hour."""
    by_hour = [None if hours is None else round(hours)]
    return Fleets(10.0, by_hour, by_hour[0], 0.99, 1.0, points, scaled)


def policy(hours: float, attainment: float, points: float = 0.0) -> Scaled:
    return Scaled(hours, round(hours), hours, attainment, points, 60.0, [0.0], [hours])


@pytest.mark.parametrize(
    ("plain", "verified", "lower", "points", "says"),
    [
        (100, 60, 59, 3, [True, False]),
        (100, 96, 60, 3, [False, True]),
        (100, 60, 54, 12, [True, False]),  # 10% for 12 points
        (None, 60, 59, 3, [True, False]),
        (None, None, 59, 3, [False, True]),
        (100, None, None, 3, [False, False]),
    ],
)
def test_what_pays(plain, verified, lower, points, says):
    """Five percent of the replica-hours, and as many as points are lost."""
    way = ways(MODEL, None)
    found = dict(zip(way, (fleet(plain), fleet(verified), fleet(lower, points)), strict=True))
    said = verdicts(found, case(trace(1.0), MODEL, USUAL, 10, 4))
    assert [verdict.pays for verdict in said] == says


@pytest.mark.parametrize(
    ("without", "with_it", "pays"),
    [
        (policy(10, 0.95), policy(10, 0.99, 1.0), True),  # four percent in time for a point
        (policy(10, 0.95), policy(10, 0.955, 1.0), False),
        (policy(10, 0.995), policy(8, 0.99, 1.0), True),
        (policy(10, 0.995), policy(8, 0.98, 1.0), False),  # cheaper, and late
        (policy(10, 0.995), policy(9.8, 0.999, 0.1), False),
    ],
)
def test_what_pays_as_a_valve(without: Scaled, with_it: Scaled, pays: bool):
    """More in time than points lost while too few are, else replica-hours."""
    found = dict(
        zip(
            ways(MODEL, None),
            (fleet(10), fleet(10, scaled=without), fleet(10, 4.0, with_it)),
            strict=True,
        )
    )
    valve = verdicts(found, case(trace(1.0), MODEL, USUAL, 10, 4))[-1]
    assert "valve" in valve.question
    assert valve.pays is pays


def test_the_page_and_the_line(advice: Advice):
    """With all numbers, without what a browser would fetch or run."""
    html = report(advice)
    assert html.count("<svg") == 4
    assert not re.search(r"<script|<img|<link|src=", html)
    assert "no fleet keeps the objective" in html
    line = json.loads(json.dumps(summary(advice, Path("advice.html"))))
    assert line["requests"] == 8 * 120 + 24 * 120
    assert [each["step_rows"] for each in line["objectives"]] == [
        each.case.model.step_rows for each in advice.objectives
    ]
    for told, each in zip(line["objectives"], advice.objectives, strict=True):
        assert f"{told['step_rows']} rows" in recommendation(each)
        assert set(told["fleets"]) == {"plain", "verified", "verified at 0.5"}


def test_a_drawn_trace_has_the_measured_means():
    """One in three minutes is busy; lengths have the histogram's spread around each mean."""
    busy = np.tile([0.5, 0.5, 60.0], 100)
    histogram = Histogram((10.0, 20.0, float("inf")), (50.0, 40.0, 10.0))
    measured = Measured(
        "m", "vllm:", 0.0, 60, busy, 30 * busy, 7 * busy, 0, histogram, None
    )  # fmt: skip
    drawn = draw(measured, seed=1)
    assert len(drawn) == pytest.approx(busy.sum(), rel=0.02)
    assert np.bincount((drawn.arrival_s // 60).astype(int) % 3)[2] == 60 * 100
    assert drawn.prompt_tokens.mean() == pytest.approx(30, rel=0.03)
    assert drawn.output_tokens.mean() == pytest.approx(7, rel=0.06)
    # Mean 11.5: 5 with half, 15 with four tenths, 30 with a tenth of the requests.
    assert (drawn.prompt_tokens < 30 * 10.5 / 11.5).mean() == pytest.approx(0.52, abs=0.05)


@pytest.mark.parametrize("line", runs("test_the_documented_command"))
def test_the_documented_command(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """To its end, on a small trace."""
    monkeypatch.chdir(tmp_path)
    write(trace(1.0), tmp_path / "trace.csv")
    done = CliRunner().invoke(app, [*line.split()[1:], "--workers", "1"], catch_exceptions=False)
    assert done.exit_code == 0
    assert json.loads(done.stdout.splitlines()[-1])["requests"] == 120
    assert (tmp_path / "advice.html").read_text().startswith("<!doctype html>")


def test_a_wrong_objective_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.csv").touch()
    words = ["advise", "trace.csv", "--model", "jobs/models/7b-verified.json", "--slo"]
    with pytest.raises(ConfigError, match="--slo '2': give the seconds"):
        CliRunner().invoke(app, [*words, "2"], catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"slos\.0\.time_per_token_s"):
        CliRunner().invoke(app, [*words, "2,fast"], catch_exceptions=False)
    done = CliRunner().invoke(app, [*words, "2,0.03", "--dry-run"], catch_exceptions=False)
    assert json.loads(done.stdout)["slos"][0]["time_per_token_s"] == 0.03
