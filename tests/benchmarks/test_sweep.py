"""A sweep's winner beside the paper's setting, by hand."""

import pytest
from sweep import PAPER, by_weight, compared

OTHER = PAPER | {"objective.noisy_share": 0.5}


def result(seed: int, *trials: tuple[dict, float | None]) -> dict:
    objectives = {"max_accuracy_loss": 0.03, "task": {"kinds": {"a": {"limit": 2}}}}
    stages = {"mars": {"minutes": 3.0}}
    return {
        "job": {"objectives": objectives, "train": {"seed": seed, "stages": stages}},
        "trials": [
            {"values": values, "tokens_per_forward": speed, "seconds": 180.0}
            for values, speed in trials
        ],
    }


def test_the_first_sweep_chooses_and_the_others_say_whether_it_holds():
    """Guards a winner that each seed chooses anew."""
    first = result(0, (OTHER, 1.5), (PAPER, 1.4))
    found = compared(first, [first, result(1, (PAPER, 1.6), (OTHER, 1.3))])
    assert found["seeds"] == [
        {"seed": 0, "winner": 1.5, "paper": 1.4, "seconds": [180.0, 180.0]},
        {"seed": 1, "winner": 1.3, "paper": 1.6, "seconds": [180.0, 180.0]},
    ]
    assert (found["minutes"], found["problems"]) == (3.0, 2)


def test_a_setting_that_was_not_measured_is_told():
    with pytest.raises(ValueError, match="max_survivors"):
        compared(result(0, (OTHER, 1.5)), [result(0, (OTHER, 1.5), (PAPER, None))])


def test_weights_of_the_clean_loss_stand_beside_each_other():
    """With the loss first, whatever was faster."""
    kept = {"steps": 9, "clean_ce": 2.0, "tokens_per_forward_expected": 1.5, "threshold": None}
    made = result(3, *(({"objective.ar_weight": weight}, 1.1) for weight in (0.0, 1.0)))
    made["trials"] = [trial | kept for trial in made["trials"]]
    assert [(row["seed"], row["weight"]) for row in by_weight([made])] == [(3, 1.0), (3, 0.0)]
