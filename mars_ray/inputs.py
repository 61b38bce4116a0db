"""What a command needs of this machine, looked for before any work begins: the files, models and
adapters that its job names, places for what it makes, and ports.

A field says by its mark (`config.base.Names`) what it names. This takes a moment, because neither
torch nor Ray is imported. What takes longer, a command checks before it starts a cluster.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any, get_args

from mars_ray.autoscale.service_model import load_service_model
from mars_ray.cluster.machine import LOOPBACK, check_port
from mars_ray.config.base import Config, Names, found
from mars_ray.config.demo import DemoJob, TinyDemoJob
from mars_ray.config.evaluate import FunctionGrade
from mars_ray.config.inputs import DataConfig, FilesSource
from mars_ray.config.serve import ExportJob, ServedModel
from mars_ray.data import files
from mars_ray.data.sources import check_some
from mars_ray.errors import ConfigError, DataError, MarsError, ModelError
from mars_ray.model.directory import CONFIG_FILE, DRAFT_CARD_FILE, check_complete, no_adapter
from mars_ray.storage import copies, hub
from mars_ray.storage.hub import package_name
from mars_ray.storage.place import Place, shown

# What the job itself makes before it is read.
_MADE: dict[type[Config], tuple[str, ...]] = {
    TinyDemoJob: ("evaluate.checkpoint", "serve.checkpoint")
}
_PACKAGE = "package:"
_SIMULATING = ("simulate", "advise")


@dataclass(frozen=True, slots=True)
class _Named:
    """A text of a job that names something."""

    key: str
    text: str
    what: str
    places: bool  # it may be a hub name or a URI
    revision: str | None  # of a hub name


def check_inputs(job: Config, *, elsewhere: bool = False) -> None:
    """Raises ConfigError, DataError or ModelError, with the key, for what is missing, is not what
    the job takes it for, or cannot be written.

    With `elsewhere`, the hub and object stores are asked as well; work that needs something from
    there asks them before it starts a cluster.
    """
    made = _MADE.get(type(job), ())
    named = [each for each in _named(job) if each.key not in made]
    for is_here in (True, False)[: 1 + elsewhere]:
        for each in named:
            with _at(each.key):
                _HERE[each.what](each) if is_here else _check_elsewhere(each)
    for key, section in _sections(job):
        match section:
            case FunctionGrade(function=name):
                _check_function(f"{key}function", name)
            case DataConfig():
                for name in ("train", "eval", "own"):
                    if isinstance(source := getattr(section, name), FilesSource):
                        with _at(f"{key}{name}"):
                            check_some(source)
    if type(job).model_fields["kind"].default in _SIMULATING and not find_spec("numba"):
        raise ConfigError("the simulator needs numba, which is not installed: pip install numba")
    match job:
        case DemoJob():
            check_port(LOOPBACK, job.adapt.service.port)
        case TinyDemoJob():
            check_port(job.serve.host, job.serve.port)


@contextmanager
def _at(key: str) -> Iterator[None]:
    """Errors begin with this key."""
    try:
        yield
    except MarsError as error:
        raise type(error)(f"{key}: {error}") from error


def _sections(section: Config, before: str = "") -> Iterator[tuple[str, Config]]:
    """The section and those in it, each with what its keys begin with."""
    yield before, section
    for name in type(section).model_fields:
        for key, value in _items(f"{before}{name}", getattr(section, name)):
            if isinstance(value, Config):
                yield from _sections(value, f"{key}.")


def _check_function(key: str, name: str) -> None:
    """Raises ConfigError if there is no such module; it is not imported yet."""
    module = name.partition(":")[0]
    # Commands do not have the working directory on their path.
    sys.path.insert(0, str(Path.cwd()))
    try:
        is_there = find_spec(module) is not None
    except ImportError:  # of the package that it is in
        is_there = False
    finally:
        sys.path.pop(0)
    if not is_there:
        raise ConfigError(f"{key}: there is no module {module}, also not in {Path.cwd()}")


def _named(section: Config, before: str = "", places: bool = False) -> Iterator[_Named]:
    """Everything that a section names, and the sections in it."""
    places = places or isinstance(section, ServedModel | ExportJob)
    for name, field in type(section).model_fields.items():
        mark = _mark(Annotated[field.annotation, None, *field.metadata])
        for key, value in _items(f"{before}{name}", getattr(section, name)):
            if isinstance(value, Config):
                yield from _named(value, f"{key}.", places)
            elif mark and isinstance(value, str):
                revision = getattr(section, "revision", None)
                yield _Named(key, value, mark.what, places, revision)


def _mark(annotation: Any) -> Names | None:
    """The mark in a field's annotation, at its top or within a union or a container."""
    found = [each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Names)]
    found += [mark for each in get_args(annotation) if (mark := _mark(each))]
    return found[0] if found else None


def _items(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case dict():
            for name, each in value.items():
                yield from _items(f"{key}.{name}", each)
        case tuple():
            for index, each in enumerate(value):
                yield from _items(f"{key}.{index}", each)
        case _:
            yield key, value


def _check_model(named: _Named) -> None:
    if not _is_elsewhere(named, "model"):
        check_complete(Path(named.text))


def _check_adapter(named: _Named) -> None:
    directory = Path(named.text)
    if not _is_elsewhere(named, "draft adapter") and not (directory / DRAFT_CARD_FILE).is_file():
        raise no_adapter(named.text)


def _is_elsewhere(named: _Named, what: str) -> bool:
    """Whether the text names no directory of this machine. Raises ModelError if it must."""
    place = Place.parse(named.text)
    if named.places and (place.is_uri or place.is_on_hub):
        return True
    if Path(named.text).is_dir():
        return False
    if named.places and not Path(named.text).is_file():
        raise ModelError(
            f"{shown(named.text)} is no {what}: there is no such directory on this machine; name "
            "one, a name of the hub (org/name), or a URI"
        )
    raise hub.missing(named.text)


def _check_start_model(named: _Named) -> None:
    if Path(named.text).is_dir():
        check_complete(Path(named.text))
    elif not Place(named.text).is_on_hub:
        raise hub.missing(named.text)


def _check_import(named: _Named) -> None:
    path = Path(expanduser(named.text))
    if named.text.startswith(_PACKAGE):
        package_name(named.text.removeprefix(_PACKAGE))
    elif path.suffix not in (".gguf", ".whl"):
        _check_start_model(_Named(named.key, str(path), named.what, False, None))
    elif not path.is_file():
        raise ModelError(f"there is no file {path} in {Path.cwd()}: correct the path")


def _check_file(named: _Named) -> None:
    is_url = named.text.startswith(("http://", "https://"))
    if not is_url and not Path(expanduser(named.text)).is_file():
        raise DataError(f"no such file: {named.text} (looked in {Path.cwd()})")


def _check_output(named: _Named) -> None:
    """Raises ConfigError if the place could not be made; it is not made yet."""
    place = Path(expanduser(named.text)).absolute()
    # Not Path.exists, which raises where a directory may not be looked into.
    there = next(parent for parent in (place, *place.parents) if os.path.exists(parent))
    is_file = named.what == "output file"
    if is_file and os.path.isdir(place):
        raise ConfigError(f"{named.text} is a directory; name a file")
    if not there.is_dir() and not (is_file and there == place):
        raise ConfigError(f"{named.text} cannot be made: {there} is a file; name another place")
    if not os.access(there, os.W_OK):
        raise ConfigError(f"{named.text} cannot be written: {there} is not yours to write to")


_HERE: dict[str, Callable[[_Named], object]] = {
    "model": _check_model,
    "start model": _check_start_model,
    "model to import": _check_import,
    "adapter": _check_adapter,
    "service model": lambda named: load_service_model(named.text),
    "file": _check_file,
    "rows": lambda named: files.expand((named.text,)),
    "shipped rows": lambda named: files.expand((str(found(named.text)),)),
    "data set": lambda named: None,  # nothing of it is on this machine
    "output": _check_output,
    "output file": _check_output,
}


def _check_elsewhere(named: _Named) -> None:
    """Raises ModelError or DataError for what the hub or an object store does not have."""
    file = {"model": CONFIG_FILE, "start model": CONFIG_FILE, "model to import": CONFIG_FILE}
    file |= {"adapter": DRAFT_CARD_FILE}
    if named.what == "data set":
        hub.check_data_set(named.text, named.revision)
    elif named.what in file:
        place = Place(named.text, named.revision)
        if named.what == "adapter":
            place = Place.parse(named.text)
        if place.is_uri or place.is_on_hub:
            with copies.pinned(place, file[named.what]) as (_, directory):
                if not (directory / file[named.what]).is_file():
                    raise ModelError(f"{shown(named.text)} has no {file[named.what]}")
