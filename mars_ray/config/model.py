"""Which model a job starts from, and its export to a place from which services load it."""

import os
import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from mars_ray.config.base import MODEL_CACHE, Checkpoint, Config, Names, Revision

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


class ExportJob(Config):
    """Copies a checkpoint with its card; a place that holds something already is refused."""

    kind: Literal["export"] = "export"
    checkpoint: Checkpoint
    revision: Revision = None
    destination: str = Field(
        description="directory or URI, another one for every version of a model"
    )
    model_cache: Annotated[str, Names("output")] = Field(
        default=MODEL_CACHE,
        description="for a copy of a checkpoint that comes from an object store",
    )

    @model_validator(mode="after")
    def _uris_have_two_slashes(self) -> Self:
        # It would become a local directory of that name, while a service would look in the store.
        if re.match(r"[a-z0-9]+:/(?!/)", self.destination):
            raise ValueError(
                f"destination {self.destination} has one slash where a URI has two, as in "
                "s3://bucket/models/mars"
            )
        return self
