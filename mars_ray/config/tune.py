"""A sweep: a training job whose last stage is tried with many settings."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mars_ray.config.base import Config, Names
from mars_ray.config.decode import EngineConfig, check_generation
from mars_ray.config.evaluate import Task
from mars_ray.config.modes import Modes, VerifiedMode
from mars_ray.config.train import MarsObjective, StageConfig, TrainJob

# Not the length or evaluation interval of trials: early stopping compares trials by them.
TUNABLE = ("objective.", "optimizer.")


def ordered(parameter: Any) -> Any:
    """The range. Raises ValueError unless its `low` is below its `high`."""
    if parameter.low >= parameter.high:
        raise ValueError(f"low {parameter.low} is not below high {parameter.high}")
    return parameter


class Uniform(Config):
    """Any number between `low` and `high`."""

    type: Literal["uniform"] = "uniform"
    low: float
    high: float

    _ordered = model_validator(mode="after")(ordered)


class LogUniform(Config):
    """Any number between `low` and `high`, each order of magnitude as likely."""

    type: Literal["log_uniform"] = "log_uniform"
    low: float = Field(gt=0)
    high: float

    _ordered = model_validator(mode="after")(ordered)


class IntRange(Config):
    """A whole number from `low` to `high`, both included."""

    type: Literal["int_range"] = "int_range"
    low: int
    high: int

    _ordered = model_validator(mode="after")(ordered)


class Choice(Config):
    """One of the values, which may be tables or lists."""

    type: Literal["choice"] = "choice"
    values: tuple[Any, ...] = Field(min_length=1)


Parameter = Annotated[Uniform | LogUniform | IntRange | Choice, Field(discriminator="type")]


class NoScheduler(Config):
    """Every trial runs to its end."""

    type: Literal["none"] = "none"


class AshaScheduler(Config):
    """Asynchronous successive halving (Li et al., 2018, arXiv 1810.05934).

    At `grace_steps`, and at each `reduction` times as many steps, a trial goes on only if its score
    is among the best 1 / `reduction` of those that came so far.
    """

    type: Literal["asha"] = "asha"
    grace_steps: int = Field(ge=1)
    reduction: float = Field(default=3, gt=1)


Scheduler = Annotated[NoScheduler | AshaScheduler, Field(discriminator="type")]


class Objectives(Config):
    """The measures by which trials are judged.

    While it trains: its score, expected T/F minus `clean_ce_weight` times the clean stream's loss,
    both held out and teacher-forced. Afterwards finished trials generate, or if they are more than
    `max_survivors` those that nothing beats in both: accuracy in mode `exact`, and T/F where it is
    highest: of `exact` and of the modes that cost at most `max_accuracy_loss`. Where a task has no
    reference answers, accuracy is the share of tokens that the model itself would have chosen, and
    the clean loss counts against a trial as in its score.
    """

    gone: ClassVar[Mapping[str, str]] = {
        "thresholds": "`objectives.modes` has whole modes",
        "groups": "a mode of `objectives.modes` has them",
    }

    clean_ce_weight: float = Field(
        default=10.0, ge=0, description="T/F that one nat of the clean loss is worth"
    )
    task: Task
    max_new_tokens: int = Field(default=256, ge=1)
    modes: Modes = Field(
        default=tuple(VerifiedMode(threshold=value, groups=65) for value in (1.0, 0.5, 0.1)),
        min_length=1,
        description="modes that survivors generate in; the default's masks for all outcomes are "
        "what the expected T/F assumes, and right where rows are free",
    )
    max_accuracy_loss: float = Field(
        default=0.01, ge=0, le=1, description="accuracy that a mode may cost, as a share"
    )
    max_survivors: int = Field(
        default=8, ge=1, description="trials that generate, best score first"
    )
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _can_generate(self) -> Self:
        check_generation(self.max_new_tokens, self.engine)
        return self


class TuneJob(Config):
    """Trials of the last stage of `train`; the stages before it run once."""

    kind: Literal["tune"] = "tune"
    output_dir: Annotated[str, Names("output")] = Field(
        min_length=1, description="shared by all nodes"
    )
    train: TrainJob = Field(description="a training job, or the path of one's file")
    space: dict[str, Parameter] = Field(
        min_length=1, description="by dotted key of the last stage, such as optimizer.learning_rate"
    )
    trials: int | None = Field(
        default=None, ge=1, description="needed but for `grid`, which tries every combination"
    )
    max_concurrent: int | None = Field(
        default=None,
        ge=1,
        description="trials at once; default: as many as there is room for at first",
    )
    searcher: Literal["random", "grid", "optuna"] = "random"
    scheduler: Scheduler = NoScheduler()
    retries: int = Field(
        default=2, ge=0, description="restarts of a trial that died with its process"
    )
    seed: int = Field(default=0, ge=0, lt=2**32)
    objectives: Objectives

    @property
    def trial_count(self) -> int:
        if self.trials is not None:
            return self.trials
        return math.prod(len(each.values) for each in self.space.values() if each.type == "choice")

    @property
    def stage_name(self) -> str:
        """The stage that is tried: the last one."""
        return list(self.train.stages)[-1]

    @property
    def stage(self) -> StageConfig:
        return self.train.stages[self.stage_name]

    @model_validator(mode="after")
    def _can_be_compared(self) -> Self:
        where = f"train.stages.{self.stage_name}"
        if not isinstance(self.stage.objective, MarsObjective):
            raise ValueError(f"{where}.objective: a sweep wants mars, the mask schedule's")
        if self.stage.epochs is not None:
            raise ValueError(
                f"{where}: give steps or minutes, not epochs: trials are compared at equal ones"
            )
        if self.train.data.eval is None:
            raise ValueError("train.data.eval is missing: trials are compared on held-out data")
        for key, parameter in self.space.items():
            if not key.startswith(TUNABLE):
                raise ValueError(f"space.{key}: a key must begin with {' or '.join(TUNABLE)}")
            if self.searcher == "grid" and not isinstance(parameter, Choice):
                raise ValueError(f"space.{key}: searcher grid wants a choice")
        if (self.trials is None) != (self.searcher == "grid"):
            raise ValueError("give trials, but not with searcher grid: it tries all combinations")
        scheduler, steps, every = self.scheduler, self.stage.steps, self.stage.eval_every_steps
        if isinstance(scheduler, NoScheduler):
            return self
        if steps is None or every is None:
            raise ValueError(f"{where}: {scheduler.type} needs steps and eval_every_steps")
        # The last evaluation does not count: the trial ends there in any case.
        last = (steps - 1) // every * every
        if scheduler.grace_steps > last:
            raise ValueError(
                f"scheduler.grace_steps {scheduler.grace_steps} is never reached: {where} has "
                f"{steps} steps, eval_every_steps {every}, and so its last comparison at {last}; "
                "lower one of these, or use scheduler none"
            )
        return self
