"""Converts our configuration to Ray Tune's objects: domains, searchers, schedulers."""

from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import (
    BasicVariantGenerator,
    ConcurrencyLimiter,
    SearchAlgorithm,
    Searcher,
)
from ray.tune.search.optuna import OptunaSearch

from mars_ray.config.tune import (
    Choice,
    IntRange,
    LogUniform,
    Parameter,
    PbtScheduler,
    TuneJob,
)
from mars_ray.files import read_journal
from mars_ray.tune.ledger import Ledger
from mars_ray.tune.rules import Rule, rule_of


class EarlyStopping(FIFOScheduler):
    """A rule as a Tune scheduler; a restored sweep feeds it again from the ledger."""

    def __init__(self, job: TuneJob, ledger: Path) -> None:
        super().__init__()
        self._job = job
        self._ledger = ledger
        self._rule: Rule | None = None  # Tune saves this object as it is before the first trial
        self._stopped: set[str] = set()  # trials stopped before the driver was killed

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        if self._rule is None:
            assert not isinstance(self._job.scheduler, PbtScheduler)
            assert self._job.stage.steps is not None
            self._rule = rule_of(self._job.scheduler, self._job.stage.steps)
            for record in Ledger(self._ledger).trials.values():
                for step, score in record.scores:
                    self._rule.stops(record.trial, step, score)
            # By the last event: a trial that has begun again no longer has this status.
            self._stopped = {
                event["trial"]
                for event in read_journal(self._ledger)
                if event["event"] == "end" and event["status"] == "stopped"
            }

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        if "score" not in result or result["step"] == self._job.stage.steps:
            return TrialScheduler.CONTINUE
        assert self._rule is not None
        # Tune may not have saved the trial's end, but its rung has judged it already.
        if trial.trial_id in self._stopped:
            return TrialScheduler.STOP
        stop = self._rule.stops(trial.trial_id, result["step"], result["score"])
        return TrialScheduler.STOP if stop else TrialScheduler.CONTINUE


def domains(job: TuneJob) -> dict[str, Any]:
    """The search space, in which a choice is drawn by its index."""
    return {key: _domain(parameter) for key, parameter in job.space.items()}


def searcher_of(job: TuneJob, at_once: int) -> Searcher | SearchAlgorithm:
    """The searcher for `at_once` concurrent trials. Optuna gets both objectives, not the score."""
    if job.searcher == "optuna":
        metrics = ["metrics/tokens_per_forward", "metrics/clean_ce"]
        optuna = OptunaSearch(metric=metrics, mode=["max", "min"], seed=job.seed)
        return ConcurrencyLimiter(optuna, max_concurrent=at_once)
    return BasicVariantGenerator(max_concurrent=at_once, random_state=job.seed)


def scheduler_of(job: TuneJob, ledger: Path) -> TrialScheduler:
    """The scheduler, which decides which trials continue."""
    if not isinstance(job.scheduler, PbtScheduler):
        return EarlyStopping(job, ledger)
    return PopulationBasedTraining(
        time_attr="step",
        metric="score",
        mode="max",
        perturbation_interval=job.scheduler.interval_steps,
        burn_in_period=job.scheduler.interval_steps,
        quantile_fraction=job.scheduler.quantile,
        hyperparam_mutations={key: _mutations(p) for key, p in job.space.items()},
        log_config=False,
    )


def _domain(parameter: Parameter) -> Any:
    match parameter:
        case Choice(values=values):
            return tune.choice(list(range(len(values))))
        case IntRange(low=low, high=high):
            return tune.randint(low, high + 1)
        case LogUniform(low=low, high=high):
            return tune.loguniform(low, high)
        case _:
            return tune.uniform(parameter.low, parameter.high)


def _mutations(parameter: Parameter) -> Any:
    # For a list, PBT moves to a neighbouring value.
    if isinstance(parameter, Choice):
        return list(range(len(parameter.values)))
    return _domain(parameter)
