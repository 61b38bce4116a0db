"""Access control: API keys with names and limits of their own.

They come from a TOML file, in plain text or, better, as their SHA-256 in hexadecimal:

    [[keys]]
    name = "team-a"
    sha256 = "2bb80d53..."
    answers = 8          # in progress at the same time
    new_tokens = 256     # per answer
    priority = -10       # the most urgent, lowest, that it may ask for; default: 0
    models = ["small"]   # that it may use; default: all

A file that has changed is in force within seconds, without a restart; one that cannot be used is
not, and the log says why.
"""

import hashlib
import hmac
import logging
import os
import time
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError, model_validator

from mars_ray.config.base import Config
from mars_ray.config.load import explain
from mars_ray.errors import ConfigError
from mars_ray.serve.openai.request_models import ApiError
from mars_ray.serve.protocol import ErrorInfo

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1
# At least so long between two looks at the file.
_LOOK_S = 2.0


class ApiKey(Config):
    """One key, and what its holder may do."""

    name: str = Field(min_length=1)
    key: str | None = Field(default=None, min_length=16, repr=False)
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$", repr=False)
    answers: int | None = Field(default=None, ge=1, description="at the same time, per ingress")
    new_tokens: int | None = Field(default=None, ge=1, description="per answer")
    priority: int = Field(default=0, description="the most urgent, lowest, that it may ask for")
    models: tuple[str, ...] | None = Field(default=None, min_length=1, description="it may use")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either key or sha256")
        return self

    @property
    def digest(self) -> str:
        """The hash used for comparison, so that no key stays in memory longer than needed."""
        return self.sha256 or _digest(self.key or "")


class _File(Config):
    keys: tuple[ApiKey, ...] = Field(min_length=1)


class ApiKeys:
    """Checks requests against a file's keys; without a file, all requests are allowed."""

    def __init__(self, path: str | None) -> None:
        """Raises ConfigError if the file cannot be used; its message names no key."""
        self._path = path
        # Before the file is read: what is written in between is seen at the next look.
        self._version = _version(path)
        self._looked_s = time.monotonic()
        self._keys = () if path is None else _read(path)
        self._open: Counter[str] = Counter()

    def holder(self, authorization: str | None) -> ApiKey | None:
        """The key of an Authorization header, or None if the service requires no keys.

        Raises ApiError. Takes the same time whichever key matches, and if none does.
        """
        self._follow()
        if not self._keys:
            return None
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip())
        right = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        if scheme.lower() != "bearer" or not right:
            message = "give a valid API key in the header 'Authorization: Bearer ...'"
            raise ApiError(ErrorInfo(401, message, code="invalid_api_key"))
        return right[0]

    def check_models(self, names: Collection[str]) -> None:
        """Raises ConfigError if a key is for a model that is not in `names`."""
        for key in self._keys:
            for model in key.models or ():
                if model not in names:
                    raise ConfigError(
                        f"key {key.name!r} is for model {model!r}, but the service has only "
                        f"{', '.join(names)}"
                    )

    def _follow(self) -> None:
        """Takes up a file that has changed, if it can be used."""
        now = time.monotonic()
        if self._path is None or now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = _read(self._path)
        except ConfigError as error:
            logger.error("the keys from before stay in force: %s", error)
        else:
            logger.warning("%s has changed: its %d keys are in force", self._path, len(self._keys))

    @contextmanager
    def lease(self, key: ApiKey | None, answers: int) -> Iterator[None]:
        """Counts the answers while they are written. Raises ApiError if the key would have too
        many."""
        if key is None:
            yield
            return
        if key.answers is not None and self._open[key.name] + answers > key.answers:
            message = f"key {key.name!r} may have {key.answers} answers written at the same time"
            raise ApiError(ErrorInfo(429, message, code="key_limit", retry_after_s=_RETRY_AFTER_S))
        self._open[key.name] += answers
        try:
            yield
        finally:
            self._open[key.name] -= answers


def _version(path: str | None) -> tuple[int, ...] | None:
    """A value that differs when the file has been written or replaced; None without a file."""
    try:
        found = os.stat(path) if path is not None else None
    except OSError:
        return None
    return found and (found.st_ino, found.st_mtime_ns, found.st_size)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _read(path: str) -> tuple[ApiKey, ...]:
    try:
        keys = _File.model_validate(tomllib.loads(Path(path).read_text("utf-8"))).keys
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the file of keys cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError(explain(error, path, _File)) from None
    names = [key.name for key in keys]
    digests = [key.digest for key in keys]
    if len(set(names)) < len(names) or len(set(digests)) < len(digests):
        raise ConfigError(f"{path}: two keys have the same name or value")
    return keys
