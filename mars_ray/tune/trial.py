"""A trial on Ray Tune: a driver that starts a Ray Train run and passes its evaluations on.

It asks for no CPU of its own, since it only waits; its workers take what the training job says.
What Tune needs for a restart is the run's directory, which is named by trial and settings: a trial
that starts again goes on from its newest checkpoint.
"""

import shutil
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune

from mars_ray.config.train import TrainJob
from mars_ray.config.tune import TuneJob
from mars_ray.errors import NonFiniteLossError
from mars_ray.train import checkpoint
from mars_ray.train.loop import StageOutcome
from mars_ray.train.metrics import MetricsReader
from mars_ray.train.on_ray import fit_stage
from mars_ray.train.plan import StagePlan, identity_hash, stage_plan
from mars_ray.train.store import CheckpointStore, below
from mars_ray.tune.space import trial_job, values_at

_POLL_S = 0.3
# Time for an attempt that is told to end: for its checkpoint and its worker group.
_STOP_TIMEOUT_S = 120
_EVAL = "eval_"
# In a copy that Tune keeps: the directory of the run that it is of.
_ORIGIN = "origin"
# In a run's directory: the state of the last checkpoint that came from another run.
_TAKEN = "taken.json"
# As bad as can be, for searchers that learn from ends: no draft is accepted, and the clean loss is
# above that of a uniform guess. Numbers beyond would only stretch their scale.
_DIVERGED = {"tokens_per_forward": 1.0, "clean_ce": 20.0}


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What all trials have in common; it travels once through the object store."""

    job: TuneJob  # with absolute paths
    start_model: Path  # of the stage that is tried


class MarsTrial(tune.Trainable):
    """One trial; each `step` is the way to the next evaluation."""

    # The plan comes by `tune.with_parameters`.
    def setup(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, config: dict[str, Any], plan: SweepPlan
    ) -> None:
        values = values_at(plan.job, config)
        self._job = job_of(plan.job, self.trial_id, values)
        _log_to(Path(self._job.output_dir) / "driver.log")
        self._plan = stage_plan(self._job, plan.job.stage_name, plan.start_model)
        self._objectives = plan.job.objectives
        self._run: _Run | None = None

    def step(self) -> dict[str, Any]:
        if self._run is None:
            self._run = _Run(self._plan)
            self._run.start()
        while True:
            # Asked first: a run that has just ended may have evaluations that were not passed on.
            ended = not self._run.is_alive()
            evaluation = self._run.next_evaluation()
            if evaluation is not None:
                return self._result(*evaluation)
            if ended:
                return self._end(self._run)
            time.sleep(_POLL_S)

    def cleanup(self) -> None:
        """Ends the run in order, so that it leaves a checkpoint and frees its workers."""
        if self._run is not None and self._run.is_alive():
            self._plan.stop_file.touch()
            self._run.join(timeout=_STOP_TIMEOUT_S)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        newest = checkpoint.newest(self._plan.run_dir)
        assert newest is not None, "asked to save before the first evaluation"
        shutil.copytree(newest, Path(checkpoint_dir) / newest.name)
        (Path(checkpoint_dir) / _ORIGIN).write_text(str(self._plan.run_dir))

    def load_checkpoint(self, checkpoint_dir: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        hand_over(Path(checkpoint_dir), self._plan)

    def _end(self, run: "_Run") -> dict[str, Any]:
        if isinstance(run.error, NonFiniteLossError):
            # It would meet the same again: a result, not an accident.
            return {"done": True, "fatal": str(run.error), "metrics": _DIVERGED}
        if run.error is not None:
            raise run.error
        outcome = run.outcome
        assert outcome is not None
        metrics = {
            name.removeprefix(_EVAL): value
            for name, value in outcome.metrics.items()
            if name.startswith(_EVAL)
        }
        model = outcome.checkpoint / checkpoint.MODEL
        return self._result(outcome.step, metrics) | {"done": True, "model": str(model)}

    def _result(self, step: int, metrics: dict[str, float]) -> dict[str, Any]:
        score = metrics["tokens_per_forward"]
        score -= self._objectives.clean_ce_weight * metrics["clean_ce"]
        return {"step": step, "score": score, "metrics": metrics}


class _Run(threading.Thread):
    """The Train run, beside the thread in which Tune calls."""

    def __init__(self, plan: StagePlan) -> None:
        super().__init__(name="trial", daemon=True)
        self._plan = plan
        newest = checkpoint.newest(plan.run_dir)
        self._seen_step = checkpoint.read_state(newest).step if newest else 0
        self.outcome: StageOutcome | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.outcome = fit_stage(self._plan)
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = error

    def next_evaluation(self) -> tuple[int, dict[str, float]] | None:
        """The first evaluation, before the last step's, that has not been passed on."""
        # From the start of the file each time: a run that begins again cuts it back.
        for record in MetricsReader(self._plan.metrics_file).new():
            step = record["step"]
            if record["kind"] != "eval" or step <= self._seen_step or step == self._last_step:
                continue
            if self._is_saved(step):
                self._seen_step = step
                return step, {k: v for k, v in record.items() if k not in ("kind", "step")}
        return None

    @property
    def _last_step(self) -> int | None:
        return self._plan.config.steps

    def _is_saved(self, step: int) -> bool:
        """Tune may ask for the weights of the step it has just heard of."""
        if step % self._plan.job.checkpoint.every_steps:
            return True
        newest = checkpoint.newest(self._plan.run_dir)
        return newest is not None and newest >= checkpoint.directory_of(self._plan.run_dir, step)


def _log_to(path: Path) -> None:
    """Write to a file what a Train run says on its driver's terminal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr = path.open("a", buffering=1, encoding="utf-8")


def job_of(job: TuneJob, trial: str, values: dict[str, Any]) -> TrainJob:
    """The trial's training job, in a directory of its own, here and in the store of copies."""
    trained = trial_job(job, values)
    place = ("trials", trial, identity_hash(trained))
    kept, directory = trained.checkpoint, Path(job.output_dir).joinpath(*place)
    if kept.storage_path is not None:
        kept = kept.model_copy(update={"storage_path": below(kept.storage_path, *place)})
    return trained.model_copy(update={"output_dir": str(directory), "checkpoint": kept})


def hand_over(directory: Path, plan: StagePlan) -> None:
    """Let a run go on from a copy of another's checkpoint: weights, optimizer and step.

    A trial that starts again is given the same copy once more: then what the run has made of it is
    kept. The weights of another copy replace the run's own from that step on; settings that did not
    change, or came back, have brought it to a directory that is not empty.
    """
    donor = checkpoint.newest(directory)
    assert donor is not None, f"{directory} holds no checkpoint"
    mine = checkpoint.newest(plan.run_dir)
    is_ours = _has_taken(donor, plan)
    if is_ours and mine is not None and mine.name >= donor.name:
        return
    state = (donor / checkpoint.STATE).read_text()
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    draft = plan.run_dir / f".{donor.name}"
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(donor, draft)
    checkpoint.assign(draft, identity_hash(plan.job))
    if not is_ours:
        _forget_from(checkpoint.step_of(donor), plan)
    shutil.rmtree(plan.run_dir / donor.name, ignore_errors=True)
    draft.replace(plan.run_dir / donor.name)
    (plan.run_dir / _TAKEN).write_text(state)


def _has_taken(donor: Path, plan: StagePlan) -> bool:
    """Whether the run's own checkpoints are this one's, or followed from it."""
    origin, taken = donor.parent / _ORIGIN, plan.run_dir / _TAKEN
    if origin.exists() and origin.read_text() == str(plan.run_dir):
        return True
    return taken.exists() and taken.read_text() == (donor / checkpoint.STATE).read_text()


def _forget_from(step: int, plan: StagePlan) -> None:
    """Delete the run's checkpoints of this step and later ones, here and in the store of copies."""
    for directory in checkpoint.complete(plan.run_dir):
        if checkpoint.step_of(directory) >= step:
            checkpoint.delete(directory)
    if plan.job.checkpoint.storage_path is not None:
        store = CheckpointStore(plan.job.checkpoint.storage_path, plan.stage)
        for copied in store.steps():
            if copied >= step:
                store.delete(copied)
