"""Texts in JSON values: listing, changing and checking them, and keys that compare prompts."""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

from mars_ray.errors import DataError

# Prompts with the same first words count as one: sampled ones often differ only at the end.
_TELLING_WORDS = 16
_WORD = re.compile(r"\w+")


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys among them."""
    match value:
        case str():
            yield value
        case dict():
            for key, part in value.items():
                yield key
                yield from texts_of(part)
        case list():
            for part in value:
                yield from texts_of(part)


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every text changed."""
    match value:
        case str():
            return change(value)
        case dict():
            return {change(key): mapped(part, change) for key, part in value.items()}
        case list():
            return [mapped(part, change) for part in value]
        case _:
            return value


def check_characters(text: str) -> None:
    """Raises DataError for half of a surrogate pair: JSON can hold it, UTF-8 cannot encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"a message holds what is no character: {error}") from error


def text_key(text: str) -> bytes:
    """A key that is the same for texts that differ only in case, spaces, punctuation or forms of
    characters."""
    return _digest(_words(text))


def beginning_key(text: str) -> bytes:
    """A key that is the same for near-duplicates: texts that begin with the same words."""
    return _digest(_words(text)[:_TELLING_WORDS])


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _digest(words: list[str]) -> bytes:
    return hashlib.sha256(" ".join(words).encode(errors="replace")).digest()[:16]
