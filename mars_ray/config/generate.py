"""Answers of a model to the prompts of a data source, as a new data source."""

from typing import Literal, Self

from pydantic import Field, model_validator

from mars_ray.config.base import Config
from mars_ray.config.data import Source
from mars_ray.config.decode import EngineConfig, ExactMode, Mode, Sampling, check_generation


class GenerateJob(Config):
    """Writes JSON lines that a `files` source reads: each conversation with the model's own answer
    in the place of its last one."""

    kind: Literal["generate"] = "generate"
    checkpoint: str
    prompts: Source
    max_bad_share: float = Field(
        default=0.01, ge=0, le=1, description="bad rows above this share are fatal"
    )
    output: str = Field(pattern=r"\.jsonl$")
    # `verified` writes the same text faster, where the checkpoint has been trained with MARS.
    mode: Mode = ExactMode()
    sampling: Sampling = Sampling()
    max_new_tokens: int = Field(default=256, ge=1)
    save_every: int = Field(default=256, ge=1, description="conversations between two writes")
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _can_generate(self) -> Self:
        check_generation((self.mode,), self.max_new_tokens, self.engine)
        return self
