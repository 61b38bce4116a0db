"""Writes the references of commands and of job files from the code: make generate."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from mars_ray.cli import app
from mars_ray.config.base import Config
from mars_ray.config.load import JOB_KINDS
from mars_ray.simulator.config import KINDS

PLACE = Path(__file__).parents[1] / "docs/reference"
_COMMANDS_HEAD = """# Commands

Every command with its arguments and options, written from the code by `make generate`; `-h` shows
the same. Tables and progress go to stderr; the last line on stdout is one JSON object. A command
that fails says why in one line, and exits with 2.
"""
_HEAD = """# Configuration

Every field of every job file, written from the code by `make generate`. A job names its `kind`; a
key that is not here is refused. Overrides on the command line use the same names, with dots:
`stages.mars.steps=100`.
"""


def pages() -> dict[str, str]:
    """Both pages as Markdown, by their file's name."""
    return {"commands.md": commands(), "configuration.md": configuration()}


def commands() -> str:
    """Every command with its parameters."""
    found: Any = typer.main.get_command(app)
    return "\n".join([_COMMANDS_HEAD, *_commands(found, "mars-ray")])


def _commands(group: Any, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        own = f"{path} {name}"
        if hasattr(command, "commands"):
            yield from _commands(command, own)
        else:
            yield _command(command, own)


def _command(command: Any, path: str) -> str:
    rows = ""
    for parameter in command.params:
        is_option = parameter.param_type_name == "option"
        name = value = parameter.metavar or parameter.name.upper()
        if is_option:
            name = ", ".join(parameter.opts) + f" {value}" * (not parameter.is_flag)
        default = parameter.default
        shown = "required" if parameter.required else ""
        if not parameter.required and default not in (None, False) and not callable(default):
            shown = f"`{_cell(str(default))}`"
        variable = f" Also `{parameter.envvar}`." if parameter.envvar else ""
        rows += f"| `{_cell(name)}` | {shown} | {_cell((parameter.help or '') + variable)} |\n"
    about = inspect.cleandoc(command.help or "")
    table = f"| argument or option | default | |\n|---|---|---|\n{rows}" if rows else ""
    return f"## {path}\n\n{about}\n\n{table}"


def configuration() -> str:
    """Every field of every job file."""
    described: list[type[Config]] = []
    kinds = JOB_KINDS | KINDS
    for job in kinds.values():
        described.extend(model for model in _within(job) if model not in described)
    jobs = list(kinds.values())
    others = sorted(
        (model for model in described if model not in jobs), key=lambda model: model.__name__
    )
    sections = [_section(model, f"kind = {kind!r}") for kind, model in kinds.items()]
    sections += [_section(model) for model in others]
    return "\n".join([_HEAD, *sections])


def _section(model: type[Config], kind: str | None = None) -> str:
    about = inspect.cleandoc(model.__doc__ or "")
    fields = [(name, field) for name, field in model.model_fields.items() if name != "kind"]
    rows = "".join(
        f"| `{name}` | {_cell(_shown(field))} | {_default(field)} "
        f"| {_cell(field.description or '')} |\n"
        for name, field in fields
    )
    title = f"## {model.__name__}\n\n" + (f"`{kind}`\n\n" if kind else "")
    return f"{title}{about}\n\n| field | type | default | |\n|---|---|---|---|\n{rows}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, Config):
        given = value.model_dump(exclude_unset=True)
        own = f"`{_cell(repr(given))}`, else " if given else ""
        return f"{own}see [{type(value).__name__}](#{type(value).__name__.lower()})"
    return f"`{_cell(repr(value))}`" if len(repr(value)) < 60 else "see the code"


def _within(kind: Any) -> Iterator[type[Config]]:
    """The models that an annotation names, and the models within those."""
    if isinstance(kind, type) and issubclass(kind, Config):
        yield kind
        for field in kind.model_fields.values():
            yield from _within(field.annotation)
    else:
        for part in get_args(kind):
            yield from _within(part)


def _shown(field: FieldInfo) -> str:
    limits = [
        f"{sign} {value}"
        for entry in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if (value := _attributes(entry).get(name)) is not None
    ]
    return ", ".join([_type(field.annotation), *limits])


def _attributes(entry: Any) -> dict[str, Any]:
    """The attributes of a constraint, which may keep them in slots."""
    names = getattr(type(entry), "__slots__", None) or getattr(entry, "__dict__", {})
    return {name: getattr(entry, name) for name in names if hasattr(entry, name)}


def _type(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type(parts[0])
    if origin in (Union, UnionType):
        return " or ".join("nothing" if part is NoneType else _type(part) for part in parts)
    if origin is Literal:
        return " or ".join(f"`{part!r}`" for part in parts)
    if origin is tuple:
        return f"list of {_type(parts[0])}"
    if origin is dict:
        return f"table of {_type(parts[1])}"
    if isinstance(kind, type) and issubclass(kind, Config):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "any"}
    return names.get(kind, str(kind))


if __name__ == "__main__":
    for file, text in pages().items():
        (PLACE / file).write_text(text)
