"""Which model a job starts from."""

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from mars_ray.config.base import Config, Names

PresetName = Literal["tiny", "small", "smollm2-135m", "qwen2.5-0.5b", "qwen2.5-7b"]


class PresetModel(Config):
    """A Qwen2-architecture model with random weights and a tokenizer trained on the data."""

    type: Literal["preset"] = "preset"
    preset: PresetName
    vocab_size: int = Field(
        default=768, ge=300, description="tokens of the byte-level BPE vocabulary"
    )


class PretrainedModel(Config):
    """A Hugging Face causal language model: a local directory or a hub name."""

    type: Literal["pretrained"] = "pretrained"
    path: Annotated[
        str, Field(min_length=1), AfterValidator(os.path.expanduser), Names("start model")
    ]
    revision: str | None = None


ModelConfig = Annotated[PresetModel | PretrainedModel, Field(discriminator="type")]
