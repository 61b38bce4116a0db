"""A new data source: a model's answers to prompts, some of which it may write itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mars_ray.config.base import MAX_BAD_SHARE, BadShare, Config, ModelPath, Names, name_of
from mars_ray.config.decode import EngineConfig, Sampling, check_generation
from mars_ray.config.inputs import CorpusSource, FilesSource, HubSource
from mars_ray.config.modes import ExactMode, Mode
from mars_ray.errors import ConfigError


class OwnPrompts(Config):
    """Prompts that the model writes itself, where no data is at hand.

    Its chat template up to where a user's message begins, sampled (Magpie, arXiv 2406.08464). Kept
    are those that end, are text and are new.
    """

    type: Literal["own"] = "own"
    count: int = Field(ge=1)
    temperature: float = Field(default=1.0, gt=0, le=2)
    top_p: float = Field(default=0.95, gt=0, le=1)
    max_new_tokens: int = Field(default=96, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**31)
    system: str | None = Field(
        default=None, description="what the model is told before; no part of the prompts"
    )
    tries_per_prompt: int = Field(
        default=4, ge=1, description="prompts sampled at most, for each one that is wanted"
    )


PromptSource = Annotated[
    CorpusSource | FilesSource | HubSource | OwnPrompts, Field(discriminator="type")
]


class GenerateJob(Config):
    """Writes JSON lines that a `files` source reads: each prompt with the model's own answer, as
    token ids and as text."""

    kind: Literal["generate"] = "generate"
    checkpoint: ModelPath
    prompts: Annotated[
        tuple[PromptSource, ...],
        BeforeValidator(lambda value: value if isinstance(value, list | tuple) else (value,)),
    ] = Field(min_length=1, description="one source, or several; their rows need no answer")
    exclude: Annotated[tuple[str, ...], Names("rows")] = Field(
        default=(), description="files whose texts must not be among the prompts: an evaluation's"
    )
    max_bad_share: BadShare = MAX_BAD_SHARE
    output: Annotated[str, Names("output file")] = Field(pattern=r"\.jsonl$")
    keep_cut: bool = Field(True, description="answers that max_new_tokens has cut off, too")
    # `verified` writes the same text faster if the checkpoint was trained with MARS.
    mode: Mode = ExactMode()
    sampling: Sampling = Sampling()
    max_new_tokens: int = Field(default=256, ge=1)
    minutes: float | None = Field(
        default=None,
        gt=0,
        description=(
            "time for all of it once an engine is ready: a quarter for answers to prompts that "
            "are there, at most a quarter for own prompts, the rest for answers to both; prompts "
            "left then get no answer, but at least ten do"
        ),
    )
    least_answers: int = Field(
        default=0,
        ge=0,
        description="refused before the first one if `minutes` cannot give so many, by the speed "
        "that is measured then",
    )
    workers: int | None = Field(
        default=None, ge=1, description="engines; default: as many as the cluster has room for"
    )
    cpus_per_worker: float = Field(default=1, gt=0)
    gpus_per_worker: float | None = Field(
        default=None, ge=0, description="default: one, if the cluster has any and engine.device may"
    )
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _can_generate(self) -> Self:
        check_generation(self.max_new_tokens, self.engine)
        for source in self.prompts:
            if isinstance(source, OwnPrompts):
                check_generation(source.max_new_tokens, self.engine)
        if self.engine.device == "cuda" and self.gpus_per_worker == 0:
            raise ValueError("gpus_per_worker 0 leaves no GPU for engine.device 'cuda'")
        if self.engine.device == "cpu" and self.gpus_per_worker:
            raise ValueError("gpus_per_worker has no effect with engine.device 'cpu'")
        return self


def generation_of(
    model: str, overrides: Sequence[str], prompts: Sequence[str], output: str | None
) -> tuple[Path | dict[str, Any], list[str]]:
    """A job's file, or the table of a job for a model that is named instead; with its overrides.

    Raises ConfigError if nothing says what is asked, or if a job is given files besides.
    """
    if model.endswith(".toml"):
        if prompts or output:
            raise ConfigError("a job names them itself: override prompts= and output=")
        return Path(model), list(overrides)
    if not prompts:
        raise ConfigError(f"generate {model}: name --prompts FILE, or give it a job")
    files = {"type": "files", "paths": list(prompts)}
    output = output or f"runs/answers/{name_of(model)}.jsonl"
    table = {"kind": "generate", "checkpoint": model, "prompts": [files], "output": output}
    return table, list(overrides)
