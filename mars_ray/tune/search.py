"""What Ray Tune tries next, the training job that a point makes, when a trial ends early, and the
sweep's own record of its trials.

A searcher draws a point: a number for each parameter, which for a choice is the index of its value.
Searchers therefore need not handle tables and lists.

Ray Tune's own schedulers lose their state when a sweep is restored, and would then compare trials
with fewer others. The rule here is a pure function of the scores seen so far, and is fed again
from the record, which has a line for each event of a trial, in order:

    {"event": "start",  "trial": id, "time": ..., "values": {...}}
    {"event": "score",  "trial": id, "time": ..., "step": 60, "score": 3.1, "metrics": {...}}
    {"event": "error",  "trial": id, "time": ..., "error": "..."}
    {"event": "end",    "trial": id, "time": ..., "status": "finished" | "stopped" | "failed"}

Times are seconds since 1970. Only the driver writes; an incomplete last line of a killed driver is
cut off.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import (
    BasicVariantGenerator,
    ConcurrencyLimiter,
    SearchAlgorithm,
    Searcher,
)
from ray.tune.search.optuna import OptunaSearch

from mars_ray.config.load import parse_job, put_value
from mars_ray.config.modes import ADAPTERS_DEPTH, widest_rows
from mars_ray.config.train import MarsObjective, TrainJob
from mars_ray.config.tune import (
    AshaScheduler,
    Choice,
    IntRange,
    LogUniform,
    TuneJob,
)
from mars_ray.core.frontier import mode_label
from mars_ray.errors import ConfigError
from mars_ray.files import append, read_journal

Status = Literal["running", "finished", "stopped", "failed"]
LEDGER_FILE = "trials.jsonl"


@dataclass(slots=True)
class TrialRecord:
    """The ledger's facts about a trial."""

    trial: str
    values: dict[str, Any]  # its settings by key of the space
    scores: list[tuple[int, float]] = field(default_factory=list)  # (step, score)
    metrics: dict[str, float] = field(default_factory=dict)  # from its last evaluation
    status: Status = "running"
    errors: list[str] = field(default_factory=list)
    model: str | None = None  # relative to the sweep's directory, once finished

    @property
    def steps(self) -> int:
        return self.scores[-1][0] if self.scores else 0

    @property
    def score(self) -> float:
        return self.scores[-1][1] if self.scores else float("-inf")


class Ledger:
    """Appends events to a file and holds the records that result from them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials: dict[str, TrialRecord] = {}
        for event in read_journal(path):
            self._take(event)

    def append(self, event: str, trial: str, **fields: Any) -> None:
        """Write an event; it is on disk when this returns."""
        record = {"event": event, "trial": trial, "time": round(time.time(), 1), **fields}
        append(self.path, record)
        self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        name = record["trial"]
        trial = self.trials.setdefault(name, TrialRecord(name, {}))
        match record["event"]:
            case "start":
                trial.values = record["values"]
                trial.status = "running"
            case "score":
                # A trial that resumes from its checkpoint may report a step again.
                trial.scores = [s for s in trial.scores if s[0] < record["step"]]
                trial.scores.append((record["step"], record["score"]))
                trial.metrics = record["metrics"]
            case "error":
                trial.errors.append(record["error"])
            case "end":
                trial.status = record["status"]
                trial.model = record.get("model")


def trials_ended(path: Path) -> int:
    """Number of trials that have ended. Only reads the file, so any process may call it."""
    events = read_journal(path, mend=False)
    return len({event["trial"] for event in events if event["event"] == "end"})


# Number of random points to try besides corners; they find settings that exclude each other.
_TRIED_POINTS = 64


def values_at(job: TuneJob, point: Mapping[str, float]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, parameter in job.space.items():
        match parameter:
            case Choice(values=choices):
                values[key] = _plain(choices[int(point[key])])
            case IntRange():
                values[key] = int(point[key])
            case _:
                values[key] = point[key]
    return values


def trial_job(job: TuneJob, values: Mapping[str, Any]) -> TrainJob:
    """The training job with these settings in its last stage. Raises ConfigError."""
    table = json.loads(job.train.model_dump_json(exclude_none=True))
    for key, value in values.items():
        keys = ["stages", job.stage_name, *key.split(".")]
        put_value(table, keys, value, f"space.{key}")
    shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    trained = parse_job(table, source=f"space at {shown}")
    assert isinstance(trained, TrainJob)
    return trained


def check_space(job: TuneJob) -> None:
    """Try the ends of every parameter, every choice, and random points, before anything starts.

    Raises ConfigError, naming the key, if one of them is not a valid training job, or if its model
    could not generate under the job's objectives.
    """
    for key, parameter in job.space.items():
        is_choice = isinstance(parameter, Choice)
        for value in parameter.values if is_choice else (parameter.low, parameter.high):
            _check_point(job, {key: _plain(value) if is_choice else value})
    for point in _some_points(job):
        _check_point(job, values_at(job, point))


def _check_point(job: TuneJob, values: Mapping[str, Any]) -> None:
    objective = trial_job(job, values).stages[job.stage_name].objective
    if not isinstance(objective, MarsObjective):
        return
    asked, depth = job.objectives, objective.max_block_size
    room = widest_rows(max(depth, ADAPTERS_DEPTH))
    for mode in asked.modes:
        if mode.asked_window > depth:
            raise ConfigError(
                f"objectives.modes: {mode_label(mode.model_dump())} asks for {mode.asked_window} "
                f"masks, more than block size {depth} is trained for: lower window"
            )
        rows = mode.most_rows(mode.widest(depth))
        if rows > room:
            raise ConfigError(
                f"objectives.modes: {mode_label(mode.model_dump())} needs forwards of {rows} rows, "
                f"more than the {room} that an engine has room for: lower branches or groups"
            )
        if rows > asked.engine.step_tokens:
            raise ConfigError(
                f"objectives.engine.max_step_tokens {asked.engine.step_tokens} is too small: in "
                f"{mode_label(mode.model_dump())}, a model of block size {depth} generates by "
                f"forwards of {rows} rows; set it to that at least, or lower its groups"
            )


def _some_points(job: TuneJob) -> Iterator[dict[str, float]]:
    if job.searcher == "grid":
        every = [domain["grid_search"] for domain in domains(job).values()]
        yield from (dict(zip(job.space, point, strict=True)) for point in product(*every))
        return
    generator = np.random.default_rng(job.seed)
    yield from (draw(job, generator) for _ in range(_TRIED_POINTS))


def draw(job: TuneJob, generator: np.random.Generator) -> dict[str, float]:
    """A point of the space, as random search draws it."""
    drawn = domains(job).items()
    return {key: domain.sample(random_state=generator) for key, domain in drawn}


def _plain(value: Any) -> Any:
    """A value as JSON has it; a frozen configuration has tuples."""
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        raise ConfigError(f"space: {value!r} is no number, text, list or table") from None


class Asha:
    """Asynchronous successive halving: only the best 1/reduction of the scores pass a rung. Higher
    scores are better; the steps of a trial increase."""

    def __init__(self, config: AshaScheduler, total_steps: int) -> None:
        self._reduction = config.reduction
        self._rungs: dict[float, dict[str, float]] = {}
        milestone = float(config.grace_steps)
        while milestone < total_steps:
            self._rungs[milestone] = {}
            milestone *= config.reduction

    def stops(self, trial: str, step: int, score: float) -> bool:
        """Add a score; whether the trial ends."""
        # A trial that skips rungs is judged at the highest one it has reached.
        stop = False
        for milestone, scores in self._rungs.items():
            if step >= milestone and trial not in scores:
                scores[trial] = score
                better = sum(other > score for other in scores.values())
                # The best so far always continues, since the first trial has no other to beat.
                stop = better >= max(1, int(len(scores) / self._reduction))
        return stop


class EarlyStopping(FIFOScheduler):
    """Successive halving as a Tune scheduler; a restored sweep feeds it again from the ledger."""

    def __init__(self, job: TuneJob, ledger: Path) -> None:
        super().__init__()
        self._job = job
        self._ledger = ledger
        self._rule: Asha | None = None  # Tune saves this object as it is before the first trial
        self._stopped: set[str] = set()  # trials stopped before the driver was killed

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        if self._rule is None:
            assert isinstance(self._job.scheduler, AshaScheduler)
            assert self._job.stage.steps is not None
            self._rule = Asha(self._job.scheduler, self._job.stage.steps)
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


def searcher_of(job: TuneJob, at_once: int) -> Searcher | SearchAlgorithm:
    """The searcher for `at_once` concurrent trials. Optuna gets both objectives, not the score."""
    if job.searcher == "optuna":
        metrics = ["metrics/tokens_per_forward", "metrics/clean_ce"]
        optuna = OptunaSearch(metric=metrics, mode=["max", "min"], seed=job.seed)
        return ConcurrencyLimiter(optuna, max_concurrent=at_once)
    return BasicVariantGenerator(max_concurrent=at_once, random_state=job.seed)


def domains(job: TuneJob) -> dict[str, Any]:
    """The search space, in which a choice is drawn by its index."""
    found = {}
    for key, parameter in job.space.items():
        match parameter:
            case Choice(values=values):
                every = tune.grid_search if job.searcher == "grid" else tune.choice
                found[key] = every(list(range(len(values))))
            case IntRange(low=low, high=high):
                found[key] = tune.randint(low, high + 1)
            case LogUniform(low=low, high=high):
                found[key] = tune.loguniform(low, high)
            case _:
                found[key] = tune.uniform(parameter.low, parameter.high)
    return found
