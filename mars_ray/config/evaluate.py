"""An evaluation: a checkpoint, a task, and the modes to measure."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mars_ray.config.base import Config
from mars_ray.config.data import FilesSource
from mars_ray.config.decode import EngineConfig, check_generation
from mars_ray.config.modes import ExactMode, Modes


class CorpusTask(Config):
    """Held-out problems of the built-in corpus, graded by their final answer."""

    type: Literal["corpus"] = "corpus"
    count: int = Field(default=256, ge=1)
    seed: int = 0


class Gsm8kTask(Config):
    """GSM8K problems from a local JSONL file, graded by the number after `####`."""

    type: Literal["gsm8k"] = "gsm8k"
    path: str
    count: int | None = Field(default=None, ge=1)


class PromptsTask(Config):
    """Prompts without reference answers, by kind. An answer is right if it is that of `exact`."""

    type: Literal["prompts"] = "prompts"
    kinds: dict[str, FilesSource] = Field(min_length=1, description="files of prompts by kind")


Task = Annotated[CorpusTask | Gsm8kTask | PromptsTask, Field(discriminator="type")]


class EvaluateJob(Config):
    """Writes `frontier.json`, a table and a plot."""

    kind: Literal["evaluate"] = "evaluate"
    checkpoint: str
    output_dir: str | None = Field(
        default=None, description="default: beside the checkpoint's model"
    )
    task: Task
    # `exact` always runs, because every other mode is compared with it, problem by problem.
    modes: Modes = (ExactMode(),)
    max_new_tokens: int = Field(default=256, ge=1)
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _can_generate(self) -> Self:
        check_generation(self.modes, self.max_new_tokens, self.engine)
        return self
