"""The base class of all configuration, the types that several sections share, and the files that
come with the package."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import ErrorDetails


class Config(BaseModel):
    """A frozen configuration section; a key it does not know is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        validate_default=True,
        allow_inf_nan=False,
    )
    # Keys of earlier releases, and what has taken their place: errors say it.
    gone: ClassVar[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Names:
    """The mark of a field that names an input or an output, which `inputs.py` looks at before a
    command's work begins."""

    what: Literal[
        "model",  # a directory; of a service, and to export, also a hub name or URI
        "start model",  # a directory or a hub name
        "model to import",  # a directory, hub name, GGUF file, package or wheel
        "adapter",  # a draft adapter, in places as a model's
        "service model",
        "file",
        "rows",  # paths or globs of `data/files.py`
        "shipped rows",  # a file, or one that comes with the package
        "data set",  # of the hub
        "output",  # a directory that is made, with its parents
        "output file",
    ]


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ValueError(f"holds {value!r} twice")
    return values


# For a tuple whose values must be distinct.
DISTINCT = AfterValidator(_distinct)
JobName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
Precision = Literal["float32", "bfloat16"]
ModelPath = Annotated[str, Names("model"), AfterValidator(expanduser)]
Checkpoint = Annotated[
    ModelPath,
    Field(
        description="directory, Hugging Face hub name (org/name), or URI (s3://, gs://, file://)"
    ),
]
Revision = Annotated[str | None, Field(description="revision of a hub name; default: its newest")]
BadShare = Annotated[float, Field(ge=0, le=1, description="bad rows above this share are fatal")]
MAX_BAD_SHARE = 0.01
MODEL_CACHE = "~/.cache/mars-ray/models"
_PACKAGE = Path(__file__).parents[1]


def found(path: str | Path) -> Path:
    """The path, or for a missing `jobs/NAME` or `adapters/NAME` the package's own copy.

    This makes the commands of the documentation work without a checkout.
    """
    path = Path(path)
    if len(path.parts) < 2 or path.parts[0] not in ("jobs", "adapters") or path.exists():
        return path
    shipped = _PACKAGE / path
    return shipped if shipped.exists() else path


def _found_adapter(name: str) -> str:
    """The same for an adapter's name, which as a hub name or URI is no path."""
    name = expanduser(name)
    place = found(name)
    return name if place == Path(name) else str(place)


AnyAdapterPath = Annotated[str, AfterValidator(_found_adapter)]
AdapterPath = Annotated[AnyAdapterPath, Names("adapter")]


def name_of(model: str) -> str:
    """The name of a model's job: the last part of the model's name, without version and suffix."""
    last = PurePath(model.removeprefix("package:").split("==")[0]).name
    last = last or Path(model).resolve().name  # of `.`
    plain = re.sub(r"[^a-z0-9._-]+", "-", last.lower().removesuffix(".gguf"))
    return plain.strip("-._") or "model"


def plain_words(error: ErrorDetails) -> str:
    """What is wrong with a value, without pydantic's names of types."""
    context = error.get("ctx", {})
    match error["type"]:
        case "too_short":
            least, count = context["min_length"], context["actual_length"]
            return f"Input should have at least {least} item{'s' * (least != 1)}, not {count}"
        case "too_long":
            most, count = context["max_length"], context["actual_length"]
            return f"Input should have at most {most} item{'s' * (most != 1)}, not {count}"
        case "union_tag_invalid":
            return f"Input should be one of {context['expected_tags']}, not {context['tag']!r}"
        case "model_type" | "dict_type":
            return "Input should be a table"
        case "tuple_type":
            return "Input should be a list"
    return error["msg"].removeprefix("Value error, ")
