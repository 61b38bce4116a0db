"""Who generates, and who is best."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
from train.small_jobs import make_model
from tune.sweeps import make_sweep

from mars_ray.config.tune import Objectives
from mars_ray.core.frontier import Frontier, FrontierPoint
from mars_ray.errors import ConfigError, TrainingError
from mars_ray.evaluate.run import written
from mars_ray.evaluate.tasks import problems_of
from mars_ray.train import checkpoint
from mars_ray.tune.results import (
    START,
    _evaluation,
    best,
    check_room,
    fastest,
    rows_of,
    summary_of,
    survivors,
    write_results,
)
from mars_ray.tune.search import Ledger

OBJECTIVES = Objectives.model_validate({"task": {"type": "corpus"}, "max_accuracy_loss": 0.02})


def frontier(*points: tuple[float | None, float, float]) -> Frontier:
    """From (threshold, accuracy, T/F); threshold None is `exact`."""
    return Frontier("model", {}, tuple(_point(*point, points[0][1]) for point in points), {})


def _point(threshold: float | None, accuracy: float, speed: float, exact: float) -> FrontierPoint:
    mode = {"type": "exact"} if threshold is None else {"type": "verified", "threshold": threshold}
    forwards, interval = 1000, (accuracy - 0.05, accuracy + 0.05)
    tokens, lost = round(speed * forwards), accuracy - exact
    return FrontierPoint(
        mode, 100, accuracy, *interval, tokens, forwards, 1.0, 1.0, lost, lost, lost, 1.0
    )


def ledger_of(tmp_path: Path, **trials: tuple[str, float, float]) -> Ledger:
    """From (status, expected T/F, clean loss) by trial."""
    ledger = Ledger(tmp_path / "trials.jsonl")
    for trial, (status, speed, loss) in trials.items():
        metrics = {"tokens_per_forward": speed, "clean_ce": loss}
        ledger.append("start", trial, values={})
        ledger.append("score", trial, step=12, score=speed - 10 * loss, metrics=metrics)
        ledger.append("end", trial, status=status, model="nowhere")
    return ledger


def test_finished_trials_generate_and_of_many_those_that_nothing_beats(tmp_path: Path):
    """Generation is what costs: `b` is slower and worse than `a`, `d` did not finish."""
    ledger = ledger_of(
        tmp_path,
        a=("finished", 3.0, 0.03),
        b=("finished", 2.9, 0.04),
        c=("finished", 2.0, 0.01),
        d=("stopped", 4.0, 0.01),
    )
    for most, expected in ((3, "abc"), (2, "ac"), (1, "a")):
        asked = OBJECTIVES.model_copy(update={"max_survivors": most})
        assert "".join(trial.trial for trial in survivors(ledger, asked)) == expected


def test_the_fastest_point_keeps_quality():
    """A threshold that costs three points is no gain, one that costs two is allowed."""
    points = (None, 0.9, 1.0), (1.0, 0.9, 3.0), (0.5, 0.88, 3.2), (0.1, 0.87, 3.5)
    assert fastest(frontier(*points), OBJECTIVES).threshold == 0.5
    # A lower threshold need not be faster, and drafts need not pay.
    points = (None, 0.9, 1.0), (1.0, 0.9, 3.2), (0.5, 0.9, 3.0), (0.1, 0.89, 3.1)
    assert fastest(frontier(*points), OBJECTIVES).threshold == 1
    assert fastest(frontier((None, 0.9, 1.0), (1.0, 0.9, 0.9)), OBJECTIVES).threshold is None


def test_the_best_trial_is_fast_without_being_worse(tmp_path: Path):
    """`a` is the fastest but lost three points of the starting model's accuracy."""
    ledger = ledger_of(tmp_path, a=("finished", 3.0, 0.03), b=("finished", 2.0, 0.01))
    trials = survivors(ledger, OBJECTIVES)
    frontiers = {
        START: frontier((None, 0.9, 1.0)),
        "a": frontier((None, 0.87, 1.0), (1.0, 0.87, 3.5)),
        "b": frontier((None, 0.89, 1.0), (1.0, 0.89, 3.0)),
    }
    assert best(frontiers, OBJECTIVES, trials).trial == "b"
    frontiers["b"] = frontier((None, 0.8, 1.0), (1.0, 0.8, 3.0))
    assert best(frontiers, OBJECTIVES, trials).trial == "a", "the most accurate if none is good"
    with pytest.raises(TrainingError, match="no trial has finished"):
        best(frontiers, OBJECTIVES, [])


def test_without_references_a_model_that_repeats_itself_is_not_best(tmp_path: Path):
    """Agreement of `exact` with itself is whole for every model, so the clean loss counts."""
    ledger = ledger_of(tmp_path, a=("finished", 3.0, 2.0), b=("finished", 5.0, 9.0))

    def by_agreement(*points: tuple[float | None, float, float]) -> Frontier:
        made = frontier(*points)
        return replace(made, points=tuple(replace(p, agreement=1.0) for p in made.points))

    frontiers = {
        START: by_agreement((None, 1.0, 1.0)),
        "a": by_agreement((None, 1.0, 1.0), (0.5, 1.0, 1.1)),
        "b": by_agreement((None, 1.0, 1.0), (0.5, 1.0, 4.0)),
    }
    assert best(frontiers, OBJECTIVES, survivors(ledger, OBJECTIVES)).trial == "a"


def test_a_column_of_the_table_has_one_type(tmp_path: Path):
    """Guards a sweep that ends without its results: 0 beside 0.5, a number beside a table."""
    ledger = Ledger(tmp_path / "trials.jsonl")
    linear = {"start": 2.0, "end": 1.0}
    for trial, weight, share in (("a", 2.0, 0), ("b", linear, 0.5)):
        values = {"objective.ar_weight": weight, "objective.acceptance_weight": share}
        ledger.append("start", trial, values=values)
    job = make_sweep(tmp_path / "model", tmp_path)
    rows = rows_of(job, ledger, {}, ledger.trials["a"])
    write_results(tmp_path, job, rows, {})
    table = pyarrow.parquet.read_table(tmp_path / "results.parquet").to_pydict()
    assert sorted(table["objective.acceptance_weight"]) == [0.0, 0.5]
    assert set(table["objective.ar_weight"]) == {"2.0", json.dumps(linear)}


def test_failed_trials_stand_in_the_results(tmp_path: Path):
    """With their errors: dropped ones would make a space look better than it is."""
    ledger = ledger_of(tmp_path, a=("finished", 3.0, 0.03))
    ledger.append("start", "b", values={"optimizer.learning_rate": 1.0})
    ledger.append("error", "b", error="the loss is not finite")
    ledger.append("end", "b", status="failed")
    job = make_sweep(tmp_path / "model", tmp_path)
    frontiers = {
        START: frontier((None, 0.9, 1.0)),
        "a": frontier((None, 0.9, 1.0), (1.0, 0.9, 3.0)),
    }
    rows = rows_of(job, ledger, frontiers, ledger.trials["a"])
    assert [(row.trial, row.status, row.error) for row in rows] == [
        ("a", "finished", None),
        ("b", "failed", "the loss is not finite"),
    ]
    summary = summary_of(job, rows, frontiers)
    assert (summary["failed"], summary["attempts_failed"], summary["steps_trained"]) == (1, 1, 12)


def test_steps_are_counted_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards steps that are looked for in a directory named `~`: a trial trains on while it is
    decided that it ends, and early stopping looked better than it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    ledger = ledger_of(tmp_path, a=("finished", 3.0, 0.03))
    run_dir = tmp_path / "sweep" / "trials" / "a" / "settings" / "stages" / "mars"
    checkpoint.directory_of(run_dir, 15).mkdir(parents=True)
    (checkpoint.directory_of(run_dir, 15) / checkpoint.MANIFEST).write_text("{}")
    job = make_sweep(tmp_path / "model", Path("~/sweep"))
    frontiers = {START: frontier((None, 0.9, 1.0))}
    rows = rows_of(job, ledger, frontiers, ledger.trials["a"])
    assert summary_of(job, rows, frontiers)["steps_trained"] == 15


def test_a_score_of_nothing_is_one(tmp_path: Path):
    """Guards a trial that stands last because its score is exactly 0."""
    ledger = Ledger(tmp_path / "trials.jsonl")
    metrics = {"tokens_per_forward": 1.0, "clean_ce": 1.0}
    for trial, score in (("a", 1.0), ("b", -3.0), ("c", 0.0)):
        ledger.append("start", trial, values={})
        ledger.append("score", trial, step=3, score=score, metrics=metrics)
    ledger.append("start", "d", values={})
    rows = rows_of(make_sweep(tmp_path, tmp_path), ledger, {}, ledger.trials["a"])
    assert [row.trial for row in rows] == ["a", "c", "b", "d"]


def test_results_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards a table that a kill has cut, in the place of the one before."""
    ledger = ledger_of(tmp_path, a=("finished", 3.0, 0.03))
    job = make_sweep(tmp_path / "model", tmp_path)
    rows = rows_of(job, ledger, {}, ledger.trials["a"])
    write_results(tmp_path, job, rows, {})
    before = (tmp_path / "results.parquet").read_bytes()

    def interrupted(_: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pyarrow.parquet, "write_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_results(tmp_path, job, rows, {})
    assert (tmp_path / "results.parquet").read_bytes() == before


def test_prompts_without_room_are_refused_before_any_trial(tmp_path: Path):
    """Guards a sweep that cannot be measured: how long prompts are is known once there is a
    tokenizer."""
    job = make_sweep(make_model(tmp_path / "model"), tmp_path)
    problems = problems_of(job.objectives.task)
    check_room(job, problems, tmp_path / "model")
    longer = job.objectives.model_copy(update={"max_new_tokens": 159})
    with pytest.raises(ConfigError, match=r"objectives\.engine\.max_context 160 is too small"):
        check_room(job.model_copy(update={"objectives": longer}), problems, tmp_path / "model")


def test_what_was_measured_by_other_objectives_is_measured_anew(tmp_path: Path):
    """Guards a table of two kinds of numbers once objectives were changed."""
    job = make_sweep(tmp_path / "model", tmp_path)
    asked = _evaluation(job, "a", tmp_path / "model", job.objectives.modes)
    assert not written(asked)
    points = (None, 0.9, 1.0), (1.0, 0.9, 3.0), (0.5, 0.9, 3.1)
    place = tmp_path / "frontiers" / "a" / "frontier.json"
    place.parent.mkdir(parents=True)
    for found, measured in ((points, True), (points[:2], False)):
        provenance = {"job": asked.model_dump(mode="json")}
        place.write_text(replace(frontier(*found), provenance=provenance).to_json())
        assert bool(written(asked)) is measured
    place.write_text(replace(frontier(*points), provenance=provenance).to_json())
    assert written(asked)
    assert not written(asked.model_copy(update={"max_new_tokens": 9}))
