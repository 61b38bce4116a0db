"""Texts in what JSON can hold: all of them, each changed, and when two prompts are the same."""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

from mars_ray.errors import DataError

# Two prompts with the same first words are one: sampled ones often differ in their last words.
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
    """Raises DataError for half of a surrogate pair, which JSON can hold and nobody can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"a message holds what is no character: {error}") from error


def text_key(text: str) -> bytes:
    """A key that is the same for texts which differ in case, spaces, punctuation or forms of
    characters only."""
    return _digest(_words(text))


def beginning_key(text: str) -> bytes:
    """A key that is the same for near-duplicates: texts that begin with the same words."""
    return _digest(_words(text)[:_TELLING_WORDS])


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _digest(words: list[str]) -> bytes:
    return hashlib.sha256(" ".join(words).encode(errors="replace")).digest()[:16]
