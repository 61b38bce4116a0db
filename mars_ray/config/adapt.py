"""An adaptation: from a model to a draft adapter that is measured and ready to be served."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mars_ray.config.base import Config, JobName, Names, Precision, name_of
from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.generate import OwnPrompts, PromptSource
from mars_ray.config.inputs import FilesSource
from mars_ray.config.modes import Modes, VerifiedMode
from mars_ray.config.train import (
    CheckpointConfig,
    DraftAdapterConfig,
    DraftObjective,
    OptimizerConfig,
)


class AnswersConfig(Config):
    """The model's answers, on which the adapter is trained."""

    prompts: tuple[PromptSource, ...] = Field(
        default=(FilesSource(paths=("jobs/requests.jsonl",)), OwnPrompts(count=1000)),
        min_length=1,
        description="default: the plain requests of jobs/requests.jsonl, and its own",
    )
    exclude: Annotated[tuple[str, ...], Names("rows")] = Field(
        default=(), description="files whose texts must not be among them, besides `measure.kinds`"
    )
    sampling: Sampling = Sampling()
    max_new_tokens: int = Field(default=128, ge=8)
    least: int = Field(
        default=100,
        ge=0,
        description="refused before the first one if `minutes` cannot give so many",
    )
    engine: EngineConfig = EngineConfig(max_batch=48, max_context=640)


class RecipeConfig(Config):
    """How the adapter is trained; workers and their devices are what the cluster has."""

    objective: DraftObjective = DraftObjective()
    adapter: DraftAdapterConfig = DraftAdapterConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=4e-3, betas=(0.9, 0.99))
    epochs: float | None = Field(
        default=None, gt=0, description="default: 1, or as `minutes` allow"
    )
    conversations_per_worker: int = Field(default=1, ge=1, description="per optimizer step")
    precision: Precision | None = Field(
        default=None, description="default: bfloat16 where all workers' devices multiply it"
    )
    max_length: int = Field(default=512, ge=8, description="tokens of prompt and answer")
    held_out: int = Field(default=96, ge=1, description="answers that do not train, at most")
    eval_every_steps: int | None = Field(default=None, ge=1)
    workers: int | None = Field(default=None, ge=1, description="default: as the cluster allows")
    checkpoint: CheckpointConfig = CheckpointConfig(every_steps=200, keep=1)


class MeasureConfig(Config):
    """The measurements of the finished adapter."""

    kinds: dict[str, FilesSource] = Field(
        default={}, description="prompts by kind; default: those held out from training"
    )
    modes: Modes = Field(
        default=(VerifiedMode(window=0), VerifiedMode(), VerifiedMode(threshold=0.3)),
        min_length=1,
        description="default: drafts from the text alone, those of the adapter alone, and the "
        "same at a threshold that changes words",
    )
    max_new_tokens: int = Field(default=128, ge=1)
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 4, 16), description="of the speeds; none: no speeds"
    )
    speed_prompts: int = Field(default=16, ge=1, description="prompts per round of speeds")
    rounds: int = Field(default=3, ge=1, description="of the speeds; one tells no ratio")
    engine: EngineConfig = EngineConfig(max_batch=16, max_context=1024)

    @model_validator(mode="after")
    def _speeds_as_served(self) -> Self:
        if self.batch_sizes and not self.engine.window_control:
            raise ValueError(
                "engine.window_control = false forces masks that do not pay, so no speeds are "
                "measured: add batch_sizes = []"
            )
        return self


class ServiceConfig(Config):
    """Settings of the serve job that is written at the end."""

    model_name: str | None = None
    port: int = Field(default=8000, ge=0, le=65535)
    cpus_per_replica: float = Field(default=1, ge=0)
    gpus_per_replica: float | None = Field(
        default=None, ge=0, description="default: one, where the cluster that serves has any"
    )
    engine: EngineConfig = EngineConfig(max_batch=16)


class AdaptJob(Config):
    """Import, prompts and answers, training, measurement, serve job and report, in one run.

    Run again, it goes on where it was.
    """

    kind: Literal["adapt"] = "adapt"
    name: JobName
    model: Annotated[str, Names("model to import")] = Field(
        min_length=1,
        description="Hugging Face directory or hub name, GGUF file, or package:NAME==VERSION",
    )
    revision: str | None = Field(default=None, description="commit, tag or branch of a hub name")
    output_dir: Annotated[str | None, Names("output")] = Field(
        default=None, description="default: runs/adapt-NAME"
    )
    minutes: float | None = Field(
        default=None, gt=0, description="time for prompts, answers and training together"
    )
    answers: AnswersConfig = AnswersConfig()
    recipe: RecipeConfig = RecipeConfig()
    measure: MeasureConfig = MeasureConfig()
    service: ServiceConfig = ServiceConfig()

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.minutes is not None and self.recipe.epochs is not None:
            raise ValueError("minutes and recipe.epochs both say how long; leave one of them out")
        return self

    @property
    def directory(self) -> str:
        return self.output_dir or f"runs/adapt-{self.name}"


def adaptation_of(
    model: str, overrides: Sequence[str], data: Sequence[Path], minutes: float | None
) -> tuple[Path | dict[str, Any], list[str]]:
    """A job's file, or the table of the default job of a model that is named instead; with its
    overrides."""
    more = [] if minutes is None else [f"minutes={minutes}"]
    if data:
        files = json.dumps([str(path) for path in data])
        more.append(f'answers.prompts=[{{type = "files", paths = {files}}}]')
    if model.endswith(".toml"):
        return Path(model), [*overrides, *more]
    return {"kind": "adapt", "name": name_of(model), "model": model}, [*overrides, *more]
