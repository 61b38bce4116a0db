"""A trial on Ray Tune: a driver that starts a Ray Train run and passes its evaluations on.

It requests no CPU of its own because it only waits; its workers take what the training job says.
For a restart Tune needs only the run's directory, which is named by trial and settings: a restarted
trial continues from its newest checkpoint.
"""

import sys
import threading
import time
from pathlib import Path
from typing import Any

from ray import tune

from mars_ray.config.train import TrainJob
from mars_ray.config.tune import TuneJob
from mars_ray.errors import NonFiniteLossError
from mars_ray.storage.place import below
from mars_ray.train import checkpoint
from mars_ray.train.loop import StageOutcome
from mars_ray.train.metrics import MetricsReader
from mars_ray.train.on_ray import fit_stage
from mars_ray.train.plan import StagePlan, identity_hash, stage_plan
from mars_ray.tune.search import trial_job, values_at

_POLL_S = 0.3
# Time for a stopped attempt to write its checkpoint and end its worker group.
_STOP_TIMEOUT_S = 120
_EVAL = "eval_"
# The worst result, for searchers that learn from final results: no draft is accepted, and the clean
# loss is above that of a uniform guess. Worse numbers would only stretch their scale.
_DIVERGED = {"tokens_per_forward": 1.0, "clean_ce": 20.0}


class MarsTrial(tune.Trainable):
    """One trial; each `step` runs to the next evaluation."""

    # `tune.with_parameters` adds the sweep's job, with absolute paths, and its starting model.
    def setup(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, config: dict[str, Any], sweep: TuneJob, start_model: Path
    ) -> None:
        job = job_of(sweep, self.trial_id, values_at(sweep, config))
        # What a Train run shows on a terminal goes to a file.
        log = Path(job.output_dir) / "driver.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        sys.stderr = log.open("a", buffering=1, encoding="utf-8")
        self._plan = stage_plan(job, sweep.stage_name, start_model)
        self._objectives = sweep.objectives
        self._run: _Run | None = None

    def step(self) -> dict[str, Any]:
        if self._run is None:
            self._run = _Run(self._plan)
            self._run.start()
        while True:
            # Checked first: a run that has just ended may have evaluations left to pass on.
            ended = not self._run.is_alive()
            evaluation = self._run.next_evaluation()
            if evaluation is not None:
                return self._result(*evaluation)
            if ended:
                return self._end(self._run)
            time.sleep(_POLL_S)

    def cleanup(self) -> None:
        """Ends the run properly, so that it leaves a checkpoint and frees its workers."""
        if self._run is not None and self._run.is_alive():
            self._plan.stop_file.touch()
            self._run.join(timeout=_STOP_TIMEOUT_S)

    def _end(self, run: "_Run") -> dict[str, Any]:
        if isinstance(run.error, NonFiniteLossError):
            # A result, not an accident: a retry would fail in the same way.
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
    """The Train run, in a thread beside the one of Tune's calls."""

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
        """The first evaluation that was not passed on yet; the last step's is left out."""
        # Reads the file from the start each time, because a restarted run truncates it.
        last = None
        for record in MetricsReader(self._plan.metrics_file).new():
            step, last = record["step"], record.get("total_steps", last)
            if record["kind"] != "eval" or step <= self._seen_step or step == last:
                continue
            self._seen_step = step
            return step, {k: v for k, v in record.items() if k not in ("kind", "step")}
        return None


def job_of(job: TuneJob, trial: str, values: dict[str, Any]) -> TrainJob:
    """The trial's training job, with directories of its own here and in the store of copies."""
    trained = trial_job(job, values)
    place = ("trials", trial, identity_hash(trained))
    kept, directory = trained.checkpoint, Path(job.output_dir).joinpath(*place)
    if kept.storage_path is not None:
        kept = kept.model_copy(update={"storage_path": below(kept.storage_path, *place)})
    return trained.model_copy(update={"output_dir": str(directory), "checkpoint": kept})
