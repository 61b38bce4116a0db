"""From a source in the configuration to conversations, one by one."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mars_ray.config.data import CorpusSource, FilesSource, Source
from mars_ray.data import corpus, files, hub
from mars_ray.data.chat import Message
from mars_ray.errors import DataError

log = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")
# What a row may look like; the first whose fields are all there is taken.
FORMS = (("messages",), ("prompt", "response"), ("instruction", "output"))
_FIELDS = {field for form in FORMS for field in form} | {"input"}
# Fields of a message that change what the assistant did; a turn without them would be a lie.
_CALLS = ("tool_calls", "function_calls", "functions")
# More than this many bad rows are counted, not told one by one.
_TOLD = 5


@dataclass(frozen=True, slots=True)
class Record:
    """A conversation and where it came from, as `file:line`, `hub name:row` or `corpus:row`."""

    messages: tuple[Message, ...]
    origin: str


class BadRow(Exception):
    """A row cannot be used; the message says why."""


class BadRows:
    """Counts the rows that cannot be used; the first few are told at once."""

    def __init__(self) -> None:
        self.seen = 0
        self.bad = 0
        self._examples: list[str] = []

    def add(self, origin: str, reason: str) -> None:
        """A row, already counted as seen, turned out to be bad."""
        self.bad += 1
        if self.bad <= _TOLD:
            self._examples.append(f"{origin}: {reason}")
            log.warning("bad row, left out: %s: %s", origin, reason)

    def check(self, max_share: float) -> None:
        """Raises DataError if more than this share of all rows was bad."""
        if self.bad > max_share * self.seen:
            raise DataError(
                f"{self.bad} of {self.seen} rows are bad, more than max_bad_share = {max_share} "
                "allows; the first:\n  " + "\n  ".join(self._examples)
            )


def read(source: Source, report: BadRows) -> Iterator[Record]:
    """The source's conversations in order; rows that cannot be used go to `report`.

    Raises DataError if the source itself cannot be read.
    """
    if isinstance(source, CorpusSource):
        rows = enumerate(corpus.problems(source.split, source.count, source.seed), start=1)
        for number, problem in rows:
            report.seen += 1
            turns = Message("user", problem.question), Message("assistant", problem.solution)
            yield Record(turns, f"corpus:{number}")
    else:
        parsed = files.rows(source.paths) if isinstance(source, FilesSource) else hub.rows(source)
        yield from _records(islice(parsed, source.limit), source.columns, report)


def _records(
    rows: Iterable[files.Row], columns: Mapping[str, str], report: BadRows
) -> Iterator[Record]:
    unknown = columns.keys() - _FIELDS
    if unknown:
        raise DataError(
            f"columns cannot rename {', '.join(sorted(unknown))}: on the left stands one of "
            f"{', '.join(sorted(_FIELDS))}, on the right the name in the data"
        )
    for origin, content in rows:
        report.seen += 1
        try:
            yield Record(_conversation(content, columns), origin)
        except BadRow as error:
            report.add(origin, str(error))


def _conversation(content: object, columns: Mapping[str, str]) -> tuple[Message, ...]:
    """Raises BadRow."""
    if isinstance(content, ValueError):
        raise BadRow(f"not JSON: {content}")
    if not isinstance(content, Mapping):
        raise BadRow(f"not an object but {type(content).__name__}")
    row = {**content, **{ours: content[name] for ours, name in columns.items() if name in content}}
    # A form whose fields were renamed was asked for by name.
    forms = sorted(FORMS, key=lambda form: columns.keys().isdisjoint(form))
    form = next((form for form in forms if all(field in row for field in form)), None)
    if form is None:
        known = " or ".join(" + ".join(form) for form in FORMS)
        raise BadRow(f"has {', '.join(map(str, content)) or 'no fields'}; expected {known}")
    if form == ("messages",):
        return _from_messages(row["messages"])
    if form == ("prompt", "response"):
        return _turns(_text(row, "prompt"), _text(row, "response"))
    question = _text(row, "instruction")
    if row.get("input"):
        question += "\n\n" + _text(row, "input")
    return _turns(question, _text(row, "output"))


def _turns(question: str, answer: str) -> tuple[Message, ...]:
    if not answer.strip():
        raise BadRow("the answer is empty")
    return Message("user", question), Message("assistant", answer)


def _text(row: Mapping[str, Any], field: str) -> str:
    if not isinstance(row[field], str):
        raise BadRow(f"{field} is not text but {type(row[field]).__name__}")
    return row[field]


def _from_messages(messages: object) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not all(isinstance(item, Mapping) for item in messages):
        raise BadRow("messages is not a list of objects with role and content")
    turns = tuple(_message(number, item) for number, item in enumerate(messages, start=1))
    if all(turn.role != "assistant" for turn in turns):
        raise BadRow("no message is by the assistant")
    if turns[0].role == "assistant":
        raise BadRow("the first message is by the assistant, so there is no prompt")
    return turns


def _message(number: int, item: Mapping[str, Any]) -> Message:
    if "role" not in item or "content" not in item:
        raise BadRow(f"message {number} has no role or no content")
    role, content = item["role"], item["content"]
    if role not in ROLES:
        raise BadRow(f"message {number} has role {role!r}; expected {', '.join(ROLES)}")
    if any(item.get(field) for field in _CALLS):
        raise BadRow(f"message {number} declares or calls functions, which is not supported")
    if not isinstance(content, str):
        raise BadRow(f"message {number} has content that is not text")
    if role == "assistant" and item.get("weight") == 0:
        raise BadRow(f"message {number} is not to be learned (weight 0), which is not supported")
    if role == "assistant" and not content.strip():
        raise BadRow(f"message {number} is an empty answer")
    return Message(role, content)
