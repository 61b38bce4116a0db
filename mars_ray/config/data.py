"""Where conversations come from and how they become token rows."""

from typing import Annotated, Literal

from pydantic import Field

from mars_ray.config.base import Config


class CorpusSource(Config):
    """The built-in corpus of templated word problems."""

    type: Literal["corpus"] = "corpus"
    split: Literal["train", "test"] = "train"
    count: int = Field(ge=1)
    seed: int = 0


class FilesSource(Config):
    """Local `.json`, `.jsonl` (also `.gz`) or `.parquet` files; globs are expanded and sorted.

    `columns` renames a file's fields to ours: `{prompt = "question", response = "answer"}`.
    """

    type: Literal["files"] = "files"
    paths: tuple[str, ...] = Field(min_length=1)
    columns: dict[str, str] = Field(default={})
    limit: int | None = Field(default=None, ge=1)


class HubSource(Config):
    """A data set of the Hugging Face hub."""

    type: Literal["hub"] = "hub"
    name: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    columns: dict[str, str] = Field(default={})
    limit: int | None = Field(default=None, ge=1)


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
    max_bad_share: float = Field(
        default=0.01, ge=0, le=1, description="bad rows above this share are fatal"
    )
    cache_dir: str | None = Field(
        default=None, description="tokenised sources; default: below the run"
    )
