"""Loads a job from a TOML file and dotted overrides; errors name file, key and remedy."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mars_ray.config.adapt import AdaptJob
from mars_ray.config.base import Config, found, plain_words
from mars_ray.config.demo import DemoJob, TinyDemoJob
from mars_ray.config.evaluate import BenchJob, EvaluateJob
from mars_ray.config.generate import GenerateJob
from mars_ray.config.serve import ExportJob, ServeJob
from mars_ray.config.train import TrainJob
from mars_ray.config.tune import TuneJob
from mars_ray.config.vllm import VLLM_NAMES
from mars_ray.errors import ConfigError

# How like a key of the same section must be to be meant before one of another section.
_SURE = 0.8
# Longer overrides are cut in errors.
_OVERRIDE_CHARS = 60

Kinds = Mapping[str, type[Config]]
# All but `simulate`, whose job belongs to the simulator (mars_ray.simulator.config).
JOB_KINDS: dict[str, type[Config]] = {
    "train": TrainJob,
    "evaluate": EvaluateJob,
    "serve": ServeJob,
    "demo": DemoJob,
    "demo-tiny": TinyDemoJob,
    "bench": BenchJob,
    "export": ExportJob,
    "tune": TuneJob,
    "generate": GenerateJob,
    "adapt": AdaptJob,
}


def load_job(path: str | Path, overrides: Sequence[str] = (), kinds: Kinds = JOB_KINDS) -> Config:
    """Read a job file of one of these kinds and apply overrides such as `stages.mars.steps=100`, in
    order.

    A `jobs/NAME.toml` that does not exist here is read from the package.

    An override's value is TOML (`4`, `true`, `[1, 2]`, `{type = "exact"}`); what does not parse as
    TOML is taken as a string. Raises ConfigError.
    """
    return parse_job(read_toml(path), source=str(path), overrides=overrides, kinds=kinds)


def parse_job(
    table: dict[str, Any],
    *,
    source: str,
    overrides: Sequence[str] = (),
    kinds: Kinds = JOB_KINDS,
) -> Config:
    """A job from a table; `source` names where it came from in errors. Raises ConfigError."""
    _read_named(table)
    for override in overrides:
        _apply(table, override)
        # After each override, because the next one may set a key in a file that this one named.
        _read_named(table)
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"{source}: kind must be one of {', '.join(kinds)}, not {kind!r}")
    try:
        return kinds[kind].model_validate(table)
    except ValidationError as error:
        raise ConfigError(explain(error, source, kinds[kind], overrides)) from None


def read_toml(path: str | Path) -> dict[str, Any]:
    """The file's table. Raises ConfigError if the file is missing or not TOML."""
    try:
        return tomllib.loads(found(path).read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such job file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a directory; name a job file, JOB.toml") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _read_named(table: dict[str, Any]) -> None:
    """Reads the training job of a sweep if the table gives the path of its file."""
    if table.get("kind") == "tune" and isinstance(table.get("train"), str):
        table["train"] = read_toml(table["train"])


def _apply(table: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r}: write it as key.subkey=value")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    put_value(table, keys, value, f"override {override!r}")


def put_value(table: dict[str, Any], keys: Sequence[str], value: Any, source: str) -> None:
    """Set a nested value of a table; missing sections are created. Raises ConfigError."""
    here: Any = table
    for key in keys[:-1]:
        here = here.setdefault(key, {})
        if not isinstance(here, dict):
            raise ConfigError(f"{source}: {key!r} is a value, not a table")
    here[keys[-1]] = value


def explain(
    error: ValidationError, source: str, job: type[Config], overrides: Sequence[str] = ()
) -> str:
    """A line for each wrong key, with the one that was perhaps meant. It begins with the override
    that set the key, or else with `source`."""
    errors = error.errors(include_url=False)
    lines: dict[str, list[str]] = {}
    for item in errors:
        # A list counts only its right items.
        inner = (other["loc"][: len(item["loc"])] for other in errors if other is not item)
        if item["type"] == "too_short" and item["loc"] in inner:
            continue
        key, line = _line(item, job)
        set_by = [text for text in overrides if _sets(text, key)]
        begin = f"override {_short(set_by[-1])}" if set_by else source
        told = lines.setdefault(f"{begin}: {key}", [])
        # Of a union, pydantic says what each member wants.
        if told and (more := line.removeprefix(f"{key}: Input should be ")) != line:
            told[-1] += f", or {more}"
        else:
            told.append(f"{begin}: {line}")
    return "\n".join(line for told in lines.values() for line in told)


def _sets(override: str, key: str) -> bool:
    """Whether an override sets this key or the table that it is in."""
    own = override.partition("=")[0].strip()
    return key == own or key.startswith(f"{own}.")


def _short(override: str) -> str:
    is_long = len(override) > _OVERRIDE_CHARS
    return repr(override[:_OVERRIDE_CHARS] + "..." if is_long else override)


def _line(item: ErrorDetails, job: type[Config]) -> tuple[str, str]:
    """The key at fault, and what is said of it."""
    # pydantic marks a wrong key of a table, as opposed to its value, by one more part.
    location = tuple(part for part in item["loc"] if part != "[key]")
    known = list(_walk(location, job))
    key = ".".join(str(part) for part, _ in known)
    message = plain_words(item)
    match item["type"]:
        case "extra_forbidden":
            return key, f"unknown key {key!r}{_nearest(known, job)}"
        case "missing":
            return key, f"missing key {key!r}"
        case "union_tag_not_found":
            return key, f"missing key '{key}.type'"
        case "union_tag_invalid":
            key += ".type"
        case "string_type" if not isinstance(item["input"], (dict, list)):
            field = [each for s in known[-1][1] if (each := s.model_fields.get(str(known[-1][0])))]
            is_shown = all(each.repr for each in field)
            message += f"; quote it: '{key}=\"{item['input']}\"'" if is_shown else "; quote it"
        case "tuple_type":
            message += f": '{key}=[...]'"
    return key, f"{key or 'job'}: {message}"


def _nearest(known: list[tuple[str | int, tuple[type[BaseModel], ...]]], job: type[Config]) -> str:
    key, sections = known[-1]
    section_of = "".join(f"{part}." for part, _ in known[:-1])
    for section in sections:
        if issubclass(section, Config) and (instead := section.gone.get(str(key))):
            return f"; it is gone: {instead}"
    fields = sorted({name for section in sections for name in section.model_fields})
    if close := difflib.get_close_matches(str(key), fields, n=1, cutoff=_SURE):
        return f"; did you mean '{section_of}{close[0]}'?"
    places = _places(job)
    if elsewhere := places.get(VLLM_NAMES.get(str(key), str(key))):
        section, _, inner = elsewhere.rpartition(".")
        if [str(part) for part, _ in known] == elsewhere.split("."):
            members = filter(_is_section, _members(job.model_fields[section].annotation))
            types = [s.model_fields["type"].default for s in members if inner in s.model_fields]
            return f"; {section}.type={' or '.join(types)} has it"
        return f"; did you mean {elsewhere!r}?"
    if close := difflib.get_close_matches(str(key), places, n=1, cutoff=_SURE):
        return f"; did you mean {places[close[0]]!r}?"
    if close := difflib.get_close_matches(str(key), fields, n=1):
        return f"; did you mean '{section_of}{close[0]}'?"
    return f"; known here: {', '.join(fields)}"


def _places(job: type[Config]) -> dict[str, str]:
    """Where a job has its fields, by name, down to those of its sections."""
    places = {name: name for name in job.model_fields}
    for name, field in job.model_fields.items():
        for section in filter(_is_section, _members(field.annotation)):
            for inner in section.model_fields:
                places.setdefault(inner, f"{name}.{inner}")
    return places


def _walk(
    location: tuple[int | str, ...], job: type[Config]
) -> Iterator[tuple[str | int, tuple[type[BaseModel], ...]]]:
    """The written keys of an error's location, each with the sections it was looked up in.

    After a union, pydantic adds the member that it tried to the location: its tag ("mars") or its
    name. That is not a key that the user wrote, so it only narrows the sections.
    """
    annotation: Any = job
    for part in location:
        members = list(_members(annotation))
        sections = tuple(kind for kind in members if _is_section(kind))
        if len(members) > 1:
            tried = [section for section in sections if part in _labels(section)]
            annotation = tried[0] if tried else None
            continue
        yield part, sections
        fields = [s.model_fields[part] for s in sections if part in s.model_fields]
        annotation = fields[0].annotation if fields else _element(annotation)


def _members(annotation: Any) -> Iterator[Any]:
    """The members of a union except None; any other annotation is its own only member."""
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    elif annotation is not NoneType:
        yield annotation


def _is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _labels(section: type[BaseModel]) -> tuple[Any, ...]:
    """Pydantic's names for the section as a member of a union."""
    if "type" not in section.model_fields:
        return (section.__name__,)
    return get_args(section.model_fields["type"].annotation)


def _element(annotation: Any) -> Any:
    """The element type of a dict, list or tuple: `stages.ar` is in a `dict[str, StageConfig]`."""
    if get_origin(annotation) in (dict, tuple, list):
        return next(arg for arg in reversed(get_args(annotation)) if arg is not ...)
    return None
