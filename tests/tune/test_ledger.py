"""The record of a sweep."""

from pathlib import Path

from mars_ray.tune.search import Ledger


def test_what_is_written_is_read_again(tmp_path: Path):
    """A retried trial keeps its errors; a step that is reported again replaces what followed."""
    path = tmp_path / "trials.jsonl"
    ledger = Ledger(path)
    ledger.append("start", "a", values={"x": 1})
    for step, score in ((3, 0.1), (6, 0.2)):
        ledger.append("score", "a", step=step, score=score, metrics={"clean_ce": score})
    ledger.append("error", "a", error="its process died")
    ledger.append("start", "a", values={"x": 1})
    ledger.append("score", "a", step=6, score=0.25, metrics={"clean_ce": 0.3})
    ledger.append("end", "a", status="finished", model="trials/a/model")
    trial = Ledger(path).trials["a"]
    assert trial == ledger.trials["a"]
    assert trial.scores == [(3, 0.1), (6, 0.25)]
    assert (trial.status, trial.errors) == ("finished", ["its process died"])


def test_a_line_that_was_being_written_is_cut_off(tmp_path: Path):
    """Guards a resume after the driver was killed in the middle of a write."""
    path = tmp_path / "trials.jsonl"
    Ledger(path).append("start", "a", values={})
    with path.open("a") as file:
        file.write('{"event": "score", "tri')
    ledger = Ledger(path)
    ledger.append("end", "a", status="stopped")
    assert Ledger(path).trials["a"].status == "stopped"
