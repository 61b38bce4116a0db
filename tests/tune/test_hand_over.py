"""Checkpoints that a run is given: whose weights it goes on from."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
from tune.sweeps import make_sweep

from mars_ray.train import checkpoint
from mars_ray.train.checkpoint import CheckpointStore
from mars_ray.train.plan import StagePlan, identity_hash
from mars_ray.tune.search import values_at
from mars_ray.tune.trial import MarsTrial, hand_over, job_of

NOWHERE = Path("nowhere")
POINT = {"optimizer.learning_rate": 1e-3, "objective.block_size": 0}


def make_plan(tmp_path: Path, trial: str, stored: Path | None = None) -> StagePlan:
    """Of trials with the same settings, as two values of a choice often are."""
    sweep = make_sweep(NOWHERE, tmp_path / "sweep")
    job = job_of(sweep, trial, values_at(sweep, POINT))
    if stored is not None:
        kept = job.checkpoint.model_copy(update={"storage_path": stored.as_uri()})
        job = job.model_copy(update={"checkpoint": kept})
    run_dir = Path(job.output_dir) / sweep.stage_name
    return StagePlan(job, sweep.stage_name, NOWHERE, run_dir, cast("Any", None), None)


def save(plan: StagePlan, step: int, weights: str, seconds: float) -> Path:
    """A checkpoint with weights that can be read."""
    directory = checkpoint.directory_of(plan.run_dir, step)
    (directory / "model").mkdir(parents=True)
    (directory / "model" / "weights").write_text(weights)
    state = {"step": step, "seconds": seconds, "identity": identity_hash(plan.job)}
    (directory / "state.json").write_text(json.dumps(state, indent=1))
    checkpoint._write_manifest(directory)
    return directory


def copy_of(plan: StagePlan, place: Path) -> Path:
    """What Tune keeps of a trial."""
    trial = object.__new__(MarsTrial)
    trial._plan = plan
    place.mkdir()
    trial.save_checkpoint(str(place))
    return place


def weights(plan: StagePlan) -> str:
    newest = checkpoint.newest(plan.run_dir)
    assert newest is not None
    return f"{(newest / 'model' / 'weights').read_text()} at {checkpoint.step_of(newest)}"


@pytest.fixture
def best(tmp_path: Path) -> StagePlan:
    plan = make_plan(tmp_path, "best")
    save(plan, 6, "best's", seconds=1.5)
    return plan


def test_the_best_ones_weights_replace_the_runs_own(tmp_path: Path, best: StagePlan):
    """Guards a trial that is booked as a copy of the best and goes on from its own weights: its new
    settings are its old ones, and it has come as far. A copy elsewhere must not bring them back."""
    stored = tmp_path / "store"
    worst = make_plan(tmp_path, "worst", stored)
    assert identity_hash(worst.job) == identity_hash(best.job)
    store = CheckpointStore(stored.as_uri(), worst.stage)
    for step in (3, 6, 7):
        store.upload(save(worst, step, "worst's", seconds=1.4))
    hand_over(copy_of(best, tmp_path / "kept"), worst)
    assert weights(worst) == "best's at 6"
    assert [checkpoint.step_of(path) for path in checkpoint.complete(worst.run_dir)] == [3, 6]
    assert store.steps() == {3}
    assert weights(best) == "best's at 6"


def test_a_run_that_starts_again_keeps_what_it_has(tmp_path: Path, best: StagePlan):
    """Guards steps that are trained twice: Tune gives the same copy once more, be it another's or
    the trial's own, and the run may have deleted the checkpoint of that step."""
    worst = make_plan(tmp_path, "worst")
    save(worst, 6, "worst's", seconds=1.4)
    given = copy_of(best, tmp_path / "given")
    hand_over(given, worst)
    save(worst, 9, "made of best's", seconds=2.0)
    checkpoint.delete(checkpoint.directory_of(worst.run_dir, 6))
    hand_over(given, worst)
    assert weights(worst) == "made of best's at 9"
    own = copy_of(worst, tmp_path / "own")
    save(worst, 12, "and more", seconds=3.0)
    checkpoint.delete(checkpoint.directory_of(worst.run_dir, 9))
    hand_over(own, worst)
    assert weights(worst) == "and more at 12"


def test_another_copy_of_the_same_run_replaces_what_the_first_gave(tmp_path: Path, best: StagePlan):
    """Guards the second hand-over between the same two trials."""
    worst = make_plan(tmp_path, "worst")
    hand_over(copy_of(best, tmp_path / "first"), worst)
    save(worst, 12, "worst's", seconds=2.0)
    save(best, 9, "better", seconds=1.9)
    hand_over(copy_of(best, tmp_path / "second"), worst)
    assert weights(worst) == "better at 9"
