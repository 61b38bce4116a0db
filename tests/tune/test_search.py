"""Optuna as a searcher: it learns from both objectives, each in its direction."""

import math
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.utils import flatten_dict
from tune.sweeps import make_sweep

from mars_ray.errors import NonFiniteLossError
from mars_ray.tune import trial as trials
from mars_ray.tune.search import EarlyStopping, Ledger, domains, searcher_of
from mars_ray.tune.trial import MarsTrial

NOWHERE = Path("nowhere")


def searcher(at_once: int):
    job = make_sweep(NOWHERE, NOWHERE, searcher="optuna")
    made = searcher_of(job, at_once)
    made.set_search_properties(None, None, domains(job))
    return made


@pytest.mark.parametrize("matters", ["tokens_per_forward", "clean_ce"])
def test_it_goes_where_the_objectives_are_better(matters):
    """One of them favours small learning rates and small block sizes, the other says nothing."""
    made, rates, blocks = searcher(at_once=1), [], []
    for number in range(60):
        point = made.suggest(str(number))
        log_rate = math.log10(point["optimizer.learning_rate"])
        bad = log_rate + 4 + point["objective.block_size"]
        measured = {"tokens_per_forward": 2.0, "clean_ce": 1.0}
        measured[matters] += bad if matters == "clean_ce" else -bad / 3
        flat = {f"metrics/{name}": value for name, value in measured.items()}
        made.on_trial_complete(str(number), flat)
        rates.append(log_rate)
        blocks.append(point["objective.block_size"])
    # Its first ten are drawn at random from -4 to -2.
    assert median(rates[-20:]) < -3.5
    assert sum(blocks[-20:]) <= 6


def test_no_more_trials_than_fit_are_open():
    """Guards a cluster that is asked for more than it has; a failed trial makes room too."""
    made = searcher(at_once=2)
    assert made.suggest("a")
    assert made.suggest("b")
    assert made.suggest("c") is None
    made.on_trial_complete("a", error=True)
    assert made.suggest("c")


def test_a_trial_that_diverged_is_learnt_from():
    """Guards points that are drawn again and again where every loss is infinite: Optuna left a
    trial open whose end had no numbers."""
    made = searcher(at_once=1)
    made.suggest("a")
    run: Any = SimpleNamespace(error=NonFiniteLossError("the loss is not finite"))
    result = MarsTrial._end(object.__new__(MarsTrial), run)
    assert result["done"]
    assert "score" not in result, "it would count for the rules that stop trials"
    made.on_trial_complete("a", flatten_dict(result))
    (trial,) = made.searcher._ot_study.trials
    assert trial.state.name == "COMPLETE"
    assert trial.values == [1.0, 20.0]


def test_who_was_stopped_stays_so_in_a_restored_sweep(tmp_path: Path):
    """Guards steps of a trial that had lost: Tune writes its state every few seconds, and goes on
    with what ended within the last ones. Also if the driver is killed once more."""
    ledger = Ledger(tmp_path / "trials.jsonl")
    metrics = {"tokens_per_forward": 1.0, "clean_ce": 1.0}
    for trial, score in (("a", 5.0), ("b", 1.0)):
        ledger.append("start", trial, values={})
        ledger.append("score", trial, step=3, score=score, metrics=metrics)
    ledger.append("end", "b", status="stopped")
    ledger.append("start", "b", values={})
    stopping = EarlyStopping(make_sweep(NOWHERE, NOWHERE), ledger.path)
    added: Any = None
    stopping.on_trial_add(added, added)
    verdicts = {}
    for trial in ("a", "b"):
        known: Any = SimpleNamespace(trial_id=trial)
        verdicts[trial] = stopping.on_trial_result(added, known, {"step": 4, "score": 0.5})
    assert verdicts == {"a": stopping.CONTINUE, "b": stopping.STOP}


def test_any_error_of_a_trial_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch):
    """Guards `AssertionError`, without a word, in the place of a disk that is full."""

    def full(_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trials, "fit_stage", full)
    plan: Any = SimpleNamespace(run_dir=NOWHERE)
    run = trials._Run(plan)
    run.start()
    run.join()
    with pytest.raises(OSError, match="No space left"):
        MarsTrial._end(object.__new__(MarsTrial), run)
