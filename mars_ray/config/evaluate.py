"""An evaluation: a checkpoint, a task, and the modes to measure."""

import json
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from mars_ray.config.base import DISTINCT, Config, ModelPath, Names, name_of
from mars_ray.config.decode import EngineConfig, check_generation
from mars_ray.config.inputs import FilesSource
from mars_ray.config.modes import ExactMode, Modes, VerifiedMode
from mars_ray.errors import ConfigError


class CorpusTask(Config):
    """Held-out problems of the built-in corpus, graded by their final answer."""

    type: Literal["corpus"] = "corpus"
    count: int = Field(default=256, ge=1)
    seed: int = 0


class Gsm8kTask(Config):
    """GSM8K problems from a local JSONL file, graded by the number after `####`."""

    type: Literal["gsm8k"] = "gsm8k"
    path: Annotated[str, Names("file")]
    count: int | None = Field(default=None, ge=1)


class PromptsTask(Config):
    """Prompts without reference answers, by kind. An answer is right if it is that of `exact`."""

    type: Literal["prompts"] = "prompts"
    kinds: dict[str, FilesSource] = Field(min_length=1, description="files of prompts by kind")


Task = Annotated[CorpusTask | Gsm8kTask | PromptsTask, Field(discriminator="type")]


class ExactMatch(Config):
    """An answer is right if it is the reference, but for space around it."""

    type: Literal["exact"] = "exact"


class RegexMatch(Config):
    """An answer is right if what the group matches last in it is what it matches in the reference,
    or the reference itself where the expression matches nothing there."""

    type: Literal["regex"] = "regex"
    pattern: str = Field(description="a Python regular expression with one group")

    @field_validator("pattern")
    @classmethod
    def _has_a_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(
                f"{pattern!r} has {groups} groups: put what is to be compared into (...), and any "
                "other group into (?:...)"
            )
        return pattern


class FunctionGrade(Config):
    """A Python function of an answer's text and its reference says whether the answer is right."""

    type: Literal["function"] = "function"
    function: str = Field(
        pattern=r"^[\w.]+:\w+$",
        description="module:function; the module may lie in the working directory",
    )


Grade = Annotated[ExactMatch | RegexMatch | FunctionGrade, Field(discriminator="type")]


class FilesTask(FilesSource):
    """Prompts of files, with reference answers or without.

    An answer with a reference is graded; where no row has one, an answer is right if it is that of
    `exact`.
    """

    grade: Grade = ExactMatch()


class EvaluateJob(Config):
    """Writes `frontier.json`, a table and a plot.

    For `files`, also a report, in a directory that belongs to the job; an interrupted evaluation
    goes on with the modes that are missing.
    """

    kind: Literal["evaluate"] = "evaluate"
    checkpoint: ModelPath
    output_dir: Annotated[str | None, Names("output")] = Field(
        default=None,
        description="default: beside the checkpoint's model; for files runs/evaluate/MODEL-FILE",
    )
    task: Annotated[CorpusTask | Gsm8kTask | PromptsTask | FilesTask, Field(discriminator="type")]
    # `exact` always runs, because every other mode is compared with it, problem by problem.
    modes: Modes = (ExactMode(),)
    max_new_tokens: int = Field(default=256, ge=1)
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _can_generate(self) -> Self:
        check_generation(self.max_new_tokens, self.engine)
        return self

    @property
    def directory(self) -> str:
        if self.output_dir is None and isinstance(self.task, FilesTask):
            file = PurePath(self.task.paths[0]).name.partition(".")[0]
            return f"runs/evaluate/{name_of(self.checkpoint)}-{name_of(file)}"
        return self.output_dir or self.checkpoint


class BenchJob(Config):
    """Our modes and transformers' `generate` on one model, timed in turn on this machine."""

    kind: Literal["bench"] = "bench"
    checkpoint: ModelPath = Field(description="directory of a model")
    modes: Modes = Field(
        default=(ExactMode(), VerifiedMode()),
        min_length=1,
        description="ratios are to the first one",
    )
    transformers: bool = True
    task: PromptsTask | None = Field(
        default=None, description="prompts of files, as many of each kind; default: the corpus"
    )
    batch_sizes: Annotated[tuple[PositiveInt, ...], DISTINCT] = Field(
        default=(1, 8), min_length=1, description="the largest one is the engine's `max_batch`"
    )
    prompts: int = Field(default=16, ge=1, description="per round, in batches; at least one batch")
    max_new_tokens: int = Field(default=64, ge=1)
    rounds: int = Field(default=3, ge=1)
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _can_generate(self) -> Self:
        check_generation(self.max_new_tokens, self.engine)
        return self


# Of a model that is named instead of a job; `exact` runs in any case.
_MODES = ({"type": "verified"}, {"type": "verified", "threshold": 0.3})


def evaluation_of(
    model: str,
    overrides: Sequence[str],
    data: Sequence[str],
    regex: str | None,
    function: str | None,
) -> tuple[Path | dict[str, Any], list[str]]:
    """A job's file, or the table of a job for a model that is named instead; with its overrides.

    Raises ConfigError if nothing says what is asked, or two things how it is graded.
    """
    is_job = model.endswith(".toml")
    if not is_job and not data:
        raise ConfigError(f"evaluate {model}: name the prompts with --data FILE, or give it a job")
    if regex is not None and function is not None:
        raise ConfigError("--regex and --function both grade the answers: leave one of them out")
    more = []
    if data:
        more.append(f'task={{type = "files", paths = {_toml(list(data))}}}')
    if regex is not None:
        more.append(f'task.grade={{type = "regex", pattern = {_toml(regex)}}}')
    if function is not None:
        more.append(f'task.grade={{type = "function", function = {_toml(function)}}}')
    # The overrides come last: they may set more of the task.
    all_overrides = [*more, *overrides]
    if is_job:
        return Path(model), all_overrides
    return {"kind": "evaluate", "checkpoint": model, "modes": [*_MODES]}, all_overrides


def _toml(value: str | list[str]) -> str:
    # Escapes that JSON has and TOML has not are those of half characters.
    return json.dumps(value, ensure_ascii=False)
