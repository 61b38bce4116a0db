"""The export of a finished checkpoint to a place from which services load it."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mars_ray.config.base import MODEL_CACHE, Checkpoint, Config, Names, Revision


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
