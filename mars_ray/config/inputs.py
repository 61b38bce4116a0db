"""What jobs start from: a model, and sources of conversations that become rows of tokens."""

import os
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from mars_ray.config.base import MAX_BAD_SHARE, BadShare, Config, Names

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


class CorpusSource(Config):
    """The built-in corpus of templated word problems."""

    type: Literal["corpus"] = "corpus"
    split: Literal["train", "test"] = "train"
    count: int = Field(ge=1)
    seed: int = 0


class _Rows(Config):
    """What sources of rows have in common."""

    columns: dict[str, str] = Field(default={})
    limit: int | None = Field(default=None, ge=1)
    shuffle_seed: int | None = Field(
        default=None, description="`limit` rows drawn at random, instead of the first"
    )

    @model_validator(mode="after")
    def _draws_something(self) -> Self:
        if self.shuffle_seed is not None and self.limit is None:
            raise ValueError("shuffle_seed has no effect without limit: all rows are taken")
        return self


class FilesSource(_Rows):
    """Local `.json`, `.jsonl` (also `.gz`) or `.parquet` files, or `.txt` with a prompt on each
    line; globs are expanded and sorted.

    `columns` renames a file's fields to ours: `{prompt = "question", response = "answer"}`;
    what lies inside a field is named by a dotted path: `{prompt = "turns.0"}`.
    """

    type: Literal["files"] = "files"
    paths: Annotated[tuple[str, ...], Names("rows")] = Field(min_length=1)


class HubSource(_Rows):
    """A data set of the Hugging Face hub."""

    type: Literal["hub"] = "hub"
    name: Annotated[str, Names("data set")]
    subset: str | None = None
    split: str = "train"
    revision: str | None = None


Source = Annotated[CorpusSource | FilesSource | HubSource, Field(discriminator="type")]


class DataConfig(Config):
    """Sources and the way from a conversation to a row of tokens."""

    train: Source
    eval: Source | None = None
    own: Source | None = Field(
        default=None,
        description="the starting model's own answers (mars-ray generate), for mars stages",
    )
    max_length: int = Field(default=512, ge=8, description="tokens of one row")
    overlong: Literal["truncate", "drop"] = "truncate"
    packing: bool = Field(False, description="put several conversations into one row")
    max_bad_share: BadShare = MAX_BAD_SHARE
    cache_dir: Annotated[str | None, Names("output")] = Field(
        default=None, description="tokenised sources; default: below the run"
    )
