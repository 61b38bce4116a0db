"""Reads the conversations of a configured source one by one.

A row may hold token ids instead of texts: a model's own answers, exactly as it read and wrote them.
Text that is decoded and encoded again may give other tokens, and a cut answer may end in half a
character; ids do not change. They belong to one tokenizer and mean something else in another.
"""

import heapq
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from mars_ray.config.inputs import CorpusSource, FilesSource, HubSource, Source
from mars_ray.data import corpus, files
from mars_ray.errors import DataError

log = logging.getLogger(__name__)

Role = Literal["system", "user", "assistant", "tool"]
ROLES = ("system", "user", "assistant")
# The forms of a row; the first whose fields are all there is taken. Null is as good as absent, in a
# row and within it: Parquet has every field in every row.
IDS = ("prompt_ids", "answer_ids")
FORMS = (IDS, ("messages",), ("prompt", "response"), ("instruction", "output"))
PROMPT_FORMS = (("messages",), ("prompt",), ("instruction",), ("question",), ("body",))
# Fields of a prompt's row that say what the answer should be; the first that is present counts.
REFERENCES = ("reference", "answer", "response", "output")
# Fields beside a form: what the conversation begins with, and an answer's thoughts.
_SYSTEM = ("system", "system_prompt")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # the last two in messages only
_FIELDS = {field for form in FORMS for field in form}
_FIELDS |= {"input", REFERENCES[0], _SYSTEM[0], "history", _THOUGHTS[0]}
# Fields of a row, or of an OpenAI batch line's body, that change what the prompt asks for.
_CHANGING = ("tools", "functions", "response_format")
# And what a conversation of texts would lose.
_MORE = (*_CHANGING[:2], "images", "videos", "audios", "chat_template_kwargs")
# Fields of a message that change what the assistant did; a turn without them would be wrong.
_CALLS = ("tool_calls", "function_calls", "function_call", "functions")
_PARTS = ("refusal", "audio", "images")
# Where a turn says that it is not to be learned, beside its weight, in the rows of other trainers.
_LEARNED = ("loss", "train")
# The first bad rows are logged one by one, up to this many; the rest are only counted.
_TOLD = 5
# Rows that are read at most to find one that can be used.
_LOOKED_AT = 10_000

# Ids are stored as int32 (`rows.py`).
_MOST = 2**31
# Decoding writes this for half a character, as at the end of a cut answer.
BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that an assistant has called; `arguments` is a JSON value."""

    name: str
    arguments: Any
    id: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The call as chat templates expect it."""
        function = {"name": self.name, "arguments": self.arguments}
        plain: dict[str, Any] = {"type": "function", "function": function}
        return plain if self.id is None else {"id": self.id} | plain


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str
    calls: tuple[Call, ...] = ()
    call_id: str | None = None  # of the call whose result a tool's message is
    reasoning: str | None = None  # the thoughts before an answer
    name: str | None = None  # of who speaks; few templates show it

    @property
    def key(self) -> tuple[str, ...]:
        """What a conversation of texts is told apart by."""
        return (self.role, self.content, *filter(None, (self.name, self.reasoning)))

    def as_dict(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        plain: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            plain["name"] = self.name
        if self.calls:
            plain["tool_calls"] = [call.as_dict() for call in self.calls]
        if self.call_id is not None:
            plain["tool_call_id"] = self.call_id
        if self.reasoning is not None:
            # The templates of Qwen3 and DeepSeek know the first name, newer ones the second.
            plain |= dict.fromkeys(("reasoning_content", "reasoning"), self.reasoning)
        return plain


@dataclass(frozen=True, slots=True)
class Record:
    """A conversation and where it came from, as `file:line`, `hub name:row` or `corpus:row`.

    If there are ids, they are the conversation: those that a model read, and those that it
    answered. The messages are then for people, and may be empty.
    """

    messages: tuple[Message, ...]
    origin: str
    prompt_ids: Sequence[int] = ()
    answer_ids: Sequence[int] = ()
    reference: Any = None  # of a prompt: what the row says that the answer should be, if it does


class BadRow(Exception):
    """A row cannot be used; the message says why."""


# Takes a row's content, the renamings of its fields, and its origin. Raises BadRow.
_Parse = Callable[[object, Mapping[str, str], str], Record]
# Some data sets write lists and objects as JSON, and these are empty.
_EMPTY = ("[]", "{}")
# A row with its fields under our names.
_Row = Mapping[str, Any]


class BadRows:
    """Counts the rows that cannot be used; the first few are logged at once."""

    def __init__(self) -> None:
        self.seen = 0
        self.reasons: list[tuple[str, str]] = []  # origin and reason of each bad row

    @property
    def bad(self) -> int:
        return len(self.reasons)

    def add(self, origin: str, reason: str) -> None:
        """Records that a row, already counted as seen, is bad."""
        self.reasons.append((origin, reason))
        if self.bad <= _TOLD:
            log.warning("bad row, left out: %s: %s", origin, reason)

    def check(self, max_share: float) -> None:
        """Raises DataError if more than this share of all rows was bad."""
        if self.bad > max_share * self.seen:
            first = (f"{origin}: {reason}" for origin, reason in self.reasons[:_TOLD])
            raise DataError(
                f"{self.bad} of {self.seen} rows are bad, more than max_bad_share = {max_share} "
                "allows; the first:\n  " + "\n  ".join(first)
            )


def read(source: Source, report: BadRows) -> Iterator[Record]:
    """The source's conversations in order; rows that cannot be used go to `report`.

    Raises DataError if the source itself cannot be read.
    """
    if isinstance(source, CorpusSource):
        rows = corpus.problems(source.split, source.count, source.seed)
        for number, problem in enumerate(rows, start=1):
            report.seen += 1
            turns = Message("user", problem.question), Message("assistant", problem.solution)
            yield Record(turns, f"corpus:{number}")
    else:
        yield from _records(source, report, _conversation)


def check_some(source: FilesSource) -> None:
    """Raises DataError if no row of the source can be used; the first that can ends the look, as
    some thousand rows do."""
    first = ""
    looked = 0
    rows = files.rows(source.paths)
    for looked, (origin, content) in enumerate(islice(rows, source.limit), start=1):
        try:
            _conversation(content, source.columns, origin)
            return
        except BadRow as error:
            first = first or f"; the first: {origin}: {error}"
        if looked == _LOOKED_AT:
            return
    raise DataError(f"none of {looked} rows can be used{first}")


def read_prompts(source: Source, report: BadRows) -> Iterator[Record]:
    """Like `read`, but for prompts: rows need no answer. One that they have is no part of the
    prompt, but its reference."""
    if isinstance(source, CorpusSource):
        for record in read(source, report):
            yield replace(record, messages=record.messages[:1])
    else:
        yield from _records(source, report, _prompt)


def _records(source: FilesSource | HubSource, report: BadRows, parse: _Parse) -> Iterator[Record]:
    columns = source.columns
    unknown = columns.keys() - _FIELDS
    if unknown:
        raise DataError(
            f"columns cannot rename {', '.join(sorted(unknown))}: on the left stands one of "
            f"{', '.join(sorted(_FIELDS))}, on the right the name in the data"
        )
    for origin, content in _chosen(source):
        report.seen += 1
        try:
            yield parse(content, columns, origin)
        except BadRow as error:
            report.add(origin, str(error))


def _chosen(source: FilesSource | HubSource) -> Iterable[files.Row]:
    """The rows in their order: all, the first `limit`, or `limit` drawn at random."""
    rows = files.rows(source.paths) if isinstance(source, FilesSource) else files.hub_rows(source)
    if source.shuffle_seed is None or source.limit is None:
        return islice(rows, source.limit)
    draw = random.Random(source.shuffle_seed)
    drawn = ((draw.random(), number, row) for number, row in enumerate(rows))
    # Those with the smallest random numbers: only these are kept, however long the file is.
    kept = heapq.nsmallest(source.limit, drawn, key=lambda item: item[:2])
    return [row for _, _, row in sorted(kept, key=lambda item: item[1])]


def _form(
    content: object, columns: Mapping[str, str], forms: tuple[tuple[str, ...], ...]
) -> tuple[tuple[str, ...], _Row]:
    """The form of a row, and the row under our names. Raises BadRow if no form matches."""
    if isinstance(content, UnicodeDecodeError):
        raise BadRow(f"not UTF-8: {content}")
    if isinstance(content, ValueError):
        raise BadRow(f"not JSON: {content}")
    if not isinstance(content, Mapping):
        raise BadRow(f"not an object but {type(content).__name__}")
    renamed = {ours: _at(content, name) for ours, name in columns.items()}
    row = {**content, **{ours: value for ours, value in renamed.items() if value is not None}}
    # Forms whose fields the user renamed come first: they were requested explicitly.
    by_name = sorted(forms, key=lambda form: columns.keys().isdisjoint(form))
    row = {name: value for name, value in row.items() if value is not None}
    form = next((form for form in by_name if all(field in row for field in form)), None)
    if form is None:
        known = " or ".join(" + ".join(form) for form in forms)
        there = ", ".join(f"{name} (null)" if content[name] is None else name for name in content)
        raise BadRow(f"has {there or 'no fields'}; expected {known}")
    return form, row


def _at(content: Mapping[str, Any], name: str) -> Any:
    """A field by its name, or a value inside it by a dotted path such as `turns.0`; None if it is
    absent."""
    if name in content:
        return content[name]
    value: Any = content
    for part in name.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def _conversation(content: object, columns: Mapping[str, str], origin: str) -> Record:
    form, row = _form(content, columns, FORMS)
    if form == IDS:  # of a line that `mars-ray generate` wrote, or of a row with ids only
        ids = [_ids(row[field], field) for field in IDS]
        messages = row.get("messages")
        return Record(() if messages is None else _from_messages(messages), origin, *ids)
    _check_whole(row)
    _check_weight(row, "the row")
    thoughts = _thoughts(row, _THOUGHTS[:1], "the row")
    if form == ("messages",):
        if thoughts:
            raise BadRow("has thoughts beside its messages: put them into the answer's message")
        return Record(_with_before(row, _from_messages(row["messages"])), origin)
    if form == ("prompt", "response"):
        question, answer = _text(row, "prompt"), _text(row, "response")
    else:
        question, answer = _instruction(row), _text(row, "output")
    return Record(_with_before(row, _turns(question, answer, thoughts)), origin)


def _says(value: Any) -> bool:
    return bool(value) and value not in _EMPTY


def _check_whole(row: _Row) -> None:
    """Raises BadRow for a row that holds more than a conversation of texts."""
    if found := [field for field in _MORE if _says(row.get(field))]:
        raise BadRow(f"has {', '.join(found)}, which is not supported")


def _check_weight(item: Mapping[str, Any], called: str) -> None:
    """Raises BadRow for what is not to be learned like the rest."""
    if (weight := item.get("weight")) not in (None, 0, 1):
        raise BadRow(f"{called} is to be learned with weight {weight}, which is not supported")
    if weight == 0:
        raise BadRow(f"{called} is not to be learned (weight 0), which is not supported")


def _with_before(row: _Row, turns: Sequence[Message]) -> tuple[Message, ...]:
    """The turns behind the system message and the earlier turns of the row's other fields."""
    system = next((row[name] for name in _SYSTEM if row.get(name)), None)
    history = row.get("history")
    if history:
        if not isinstance(history, list) or not all(_is_pair(pair) for pair in history):
            raise BadRow("history is not a list of pairs of a question and its answer")
        if len(turns) > 2 or any(turn.role == "system" for turn in turns):
            raise BadRow("has history beside messages: put it into the messages")
        pairs = [_turns(question, answer) for question, answer in history]
        turns = tuple(turn for pair in (*pairs, turns) for turn in pair)
    if system:
        if not isinstance(system, str):
            raise BadRow(f"system is not text but {type(system).__name__}")
        if turns[0].role != "system":
            return Message("system", system), *turns
        if turns[0].content != system:
            raise BadRow("has another system message in system than in messages")
    return tuple(turns)


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair)


def _thoughts(item: Mapping[str, Any], names: Sequence[str], called: str) -> str | None:
    """The thoughts before an answer, under one of these names."""
    found = next((item[name] for name in names if _says(item.get(name))), None)
    if found is not None and not isinstance(found, str):
        raise BadRow(f"{called} has thoughts that are not text but {type(found).__name__}")
    return found


def _ids(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise BadRow(f"{name} is not a list of token ids")
    if not all(type(item) is int and 0 <= item < _MOST for item in value):
        raise BadRow(f"{name} holds what is no token id")
    return value


def _prompt(content: object, columns: Mapping[str, str], origin: str) -> Record:
    form, row = _form(content, columns, PROMPT_FORMS)
    reference = next((row[name] for name in REFERENCES if row.get(name) not in (None, "")), None)
    if form == ("body",):
        form, row = _batch_line(row["body"])
        before: _Row = {}
    else:
        _check_whole(row)
        before = row
    match form:
        case ("messages",):
            turns = _messages(row["messages"])
            if turns and turns[-1].role == "assistant":
                reference = turns[-1].content if reference is None else reference
                turns = turns[:-1]
            if all(turn.role != "user" for turn in turns):
                raise BadRow("no message is by the user")
        case ("instruction",):
            turns = (Message("user", _instruction(row)),)
        case (field,):
            turns = (Message("user", _text(row, field)),)
        case _:
            raise AssertionError(form)
    if not turns[-1].content.strip():
        raise BadRow("the prompt is empty")
    turns = _with_before(before, turns)
    return Record(turns, origin, reference=reference)


def _batch_line(body: object) -> tuple[tuple[str, ...], _Row]:
    """The form and the row in the body of an OpenAI batch line; its settings of sampling and
    lengths are left to whoever reads the prompt."""
    if not isinstance(body, Mapping):
        raise BadRow(f"body is not an object but {type(body).__name__}")
    if asked := [field for field in _CHANGING if body.get(field)]:
        raise BadRow(f"body has {', '.join(asked)}, which is not supported")
    for form in (("messages",), ("prompt",)):
        if body.get(form[0]) is not None:
            return form, body
    raise BadRow("body has neither messages nor prompt")


def _instruction(row: _Row) -> str:
    question = _text(row, "instruction")
    return question + "\n\n" + _text(row, "input") if row.get("input") else question


def _turns(question: str, answer: str, thoughts: str | None = None) -> tuple[Message, ...]:
    if not answer.strip():
        raise BadRow("the answer is empty")
    return Message("user", question), Message("assistant", answer, reasoning=thoughts)


def _text(row: _Row, field: str) -> str:
    if not isinstance(row[field], str):
        raise BadRow(f"{field} is not text but {type(row[field]).__name__}")
    return row[field]


def _messages(messages: object) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not all(isinstance(item, Mapping) for item in messages):
        raise BadRow("messages is not a list of objects with role and content")
    return tuple(_message(number, item) for number, item in enumerate(messages, start=1))


def _from_messages(messages: object) -> tuple[Message, ...]:
    turns = _messages(messages)
    if all(turn.role != "assistant" for turn in turns):
        raise BadRow("no message is by the assistant")
    if turns[0].role == "assistant":
        raise BadRow("the first message is by the assistant, so there is no prompt")
    return turns


def _message(number: int, item: Mapping[str, Any]) -> Message:
    role, content = item.get("role"), item.get("content")
    if role is None or content is None:
        raise BadRow(f"message {number} has no role or no content")
    if role not in ROLES:
        raise BadRow(f"message {number} has role {role!r}; expected {', '.join(ROLES)}")
    if any(_says(item.get(field)) for field in _CALLS):
        raise BadRow(f"message {number} declares or calls functions, which is not supported")
    if found := [field for field in _PARTS if _says(item.get(field))]:
        raise BadRow(f"message {number} has {', '.join(found)}, which is not supported")
    if not isinstance(content, str):
        raise BadRow(f"message {number} has content that is not text")
    name, thoughts = item.get("name"), _thoughts(item, _THOUGHTS, f"message {number}")
    if name is not None and not isinstance(name, str):
        raise BadRow(f"message {number} has a name that is not text")
    if role != "assistant":
        if thoughts:
            raise BadRow(f"message {number} has thoughts, and is not by the assistant")
        return Message(role, content, name=name)
    _check_weight(item, f"message {number}")
    if found := [field for field in _LEARNED if item.get(field) is False]:
        how = f"not to be learned ({found[0]} false)"
        raise BadRow(f"message {number} is {how}, which is not supported")
    if not content.strip():
        raise BadRow(f"message {number} is an empty answer")
    return Message(role, content, reasoning=thoughts, name=name)
