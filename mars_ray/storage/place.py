"""Names of places, and their form in messages without secrets.

runs/demo/models/mars       a directory, which every node that uses it must see
org/name, org/name@v2       the Hugging Face hub: its newest commit, or a revision
s3://bucket/models/mars     an object store, or whatever else pyarrow opens: gs://, file://
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from mars_ray.errors import MarsError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_USER = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*:/+)[^/?#]*@")


@dataclass(frozen=True, slots=True)
class Place:
    """A place as users name it."""

    name: str
    revision: str | None = None  # a branch, tag or commit of the hub

    @classmethod
    def parse(cls, name: str) -> "Place":
        """The place of a name that may end with @REVISION; a directory's own name may have an @."""
        repository, at, revision = name.partition("@")
        if at and not Path(name).is_dir() and (place := cls(repository, revision)).is_on_hub:
            return place
        return cls(name)

    @property
    def is_uri(self) -> bool:
        return "://" in self.name

    @property
    def is_on_hub(self) -> bool:
        """Whether the place is a hub repository; a name of an existing directory is the
        directory."""
        fits = _HUB_NAME.fullmatch(self.name) is not None
        return fits and not self.is_uri and not Path(self.name).is_dir()


def shown(uri: str) -> str:
    """A URI without possible secrets: user, password and options. Other names are unchanged."""
    # Also with one slash: that is no URI but a typing error, which a message may quote.
    uri = _USER.sub(r"\1", uri)
    if "://" not in uri:
        return uri
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def below(uri: str, *names: str) -> str:
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(path="/".join((parts.path.rstrip("/"), *names))))


@contextmanager
def explained(error: type[MarsError], action: str, uri: str, advice: str = "") -> Iterator[None]:
    """Turns pyarrow's errors into `error`: "cannot ACTION URI: why", followed by the advice."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError) as raised:
        # The text may contain the URI with its secrets, and so may the chain of exceptions.
        why = str(raised).replace(uri, shown(uri))
        raise error(f"cannot {action} {shown(uri)}: {why}{advice}") from None
