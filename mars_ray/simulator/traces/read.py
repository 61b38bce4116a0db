"""Traces from files: our own schema, and two published ones.

The schema has `arrival_s`, `prompt_tokens`, `output_tokens`, and optionally
`priority`, `deadline_s`, `pinned_threshold`, `session`, as columns of a CSV or keys of JSON lines.
An unusable row is an error that names file and line, because a trace with gaps would be a different
load.
"""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mars_ray.errors import DataError
from mars_ray.simulator.traces.trace import Ints, Trace

# A row, in the order of the schema.
Row = tuple[float, int, int, int, float, float]
# No model's context is longer.
_MOST_TOKENS = 10**9
_REQUIRED = {"arrival_s", "prompt_tokens", "output_tokens"}
_OPTIONAL = {"priority": 0, "deadline_s": math.inf, "pinned_threshold": 0.0, "session": ""}
# Of Mooncake's prompts (its README, "hash_ids").
_BLOCK_TOKENS = 512


def read_trace(path: str | Path) -> Trace:
    """A CSV or JSONL file in our schema, optionally gzipped. Raises DataError."""
    sessions: list[str] = []

    def row(table: dict[str, Any]) -> Row:
        values, session = _own_row(table)
        sessions.append(session)
        return values

    trace = _trace(path, "mars-ray's trace schema", row)
    parent, shared = from_sessions(sessions, trace.prompt_tokens, trace.output_tokens)
    return _from_zero(replace(trace, parent=parent, shared_tokens=shared))


def read_azure(path: str | Path) -> Trace:
    """Azure's LLM traces of 2023: TIMESTAMP, ContextTokens, GeneratedTokens. Raises DataError."""

    def row(table: dict[str, Any]) -> Row:
        moment = datetime.fromisoformat(table["TIMESTAMP"]).timestamp()
        return _row(moment, table["ContextTokens"], table["GeneratedTokens"])

    return _from_zero(_trace(path, "Azure's LLM trace", row))


def read_mooncake(path: str | Path) -> Trace:
    """Mooncake's traces: timestamp, input_length, output_length, hash_ids. Raises DataError."""
    blocks: list[list[int]] = []

    def row(table: dict[str, Any]) -> Row:
        blocks.append([_whole(block) for block in table["hash_ids"]])
        return _row(table["timestamp"] / 1000, table["input_length"], table["output_length"])

    trace = _trace(path, "Mooncake's trace", row)
    parent, shared = from_blocks(blocks, trace.prompt_tokens, _BLOCK_TOKENS)
    return _from_zero(replace(trace, parent=parent, shared_tokens=shared))


def _trace(path: str | Path, what: str, row: Callable[[dict[str, Any]], Row]) -> Trace:
    rows: list[Row] = []
    for line, table in _tables(Path(path).expanduser()):
        try:
            rows.append(row(table))
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{path}:{line}: not a row of {what}: {reason}") from None
        if len(rows) > 1 and rows[-1][0] < rows[-2][0]:
            raise DataError(f"{path}:{line}: arrives before the row above it; sort the file")
    if not rows:
        raise DataError(f"{path}: no requests")
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return Trace(Path(path).name.split(".")[0], *columns)


def _own_row(table: dict[str, Any]) -> tuple[Row, str]:
    unknown = table.keys() - _REQUIRED - _OPTIONAL.keys()
    if unknown:
        raise ValueError(f"unknown column {min(map(str, unknown))!r}")
    given = {key: value for key, value in table.items() if value not in ("", None)}
    more = _OPTIONAL | {key: given[key] for key in _OPTIONAL.keys() & given.keys()}
    values = _row(
        given["arrival_s"],
        given["prompt_tokens"],
        given["output_tokens"],
        more["priority"],
        more["deadline_s"],
        more["pinned_threshold"],
    )
    if not isinstance(more["session"], str | int):
        raise ValueError(f"session {more['session']!r} is neither a text nor a whole number")
    return values, str(more["session"])


def _row(
    arrival_s: Any,
    prompt: Any,
    output: Any,
    priority: Any = 0,
    deadline_s: Any = math.inf,
    pinned: Any = 0.0,
) -> Row:
    """The values of a row, checked. Raises ValueError."""
    row = (
        float(arrival_s),
        _whole(prompt),
        _whole(output),
        _whole(priority),
        float(deadline_s),
        float(pinned),
    )
    if not (math.isfinite(row[0]) and row[0] >= 0):
        raise ValueError(f"arrives at {arrival_s} s")
    if not (1 <= row[1] <= _MOST_TOKENS and 1 <= row[2] <= _MOST_TOKENS):
        raise ValueError(
            f"{prompt} prompt and {output} output tokens; both must be 1 to {_MOST_TOKENS}"
        )
    if not row[4] > 0:
        raise ValueError(f"a deadline of {deadline_s} s")
    if not 0 <= row[5] <= 1:
        raise ValueError(f"pinned_threshold {pinned} is not in [0, 1]")
    return row


def _whole(number: Any) -> int:
    """A whole number. Raises ValueError for 1.5, which int() would cut."""
    if isinstance(number, float) and not number.is_integer():
        raise ValueError(f"{number} is no whole number")
    return int(number)


def missing(path: str | Path) -> str:
    """The error text for a trace that is not there."""
    page = "docs/how-to/capacity-and-cost.md"
    return f"{path}: no such file; {page} says where published traces come from"


def _tables(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and content of each row."""
    suffix = path.suffixes[-2:][0] if path.suffix == ".gz" else path.suffix
    if suffix not in (".csv", ".jsonl"):
        raise DataError(f"{path}: a trace is a .csv or .jsonl file, also with .gz")
    try:
        with (
            # Spreadsheets begin a file with a byte order mark.
            gzip.open(path, "rt", encoding="utf-8-sig")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig")
        ) as file:
            yield from (_csv_rows if suffix == ".csv" else _json_rows)(path, file)
    except FileNotFoundError:
        raise DataError(missing(path)) from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def _csv_rows(path: Path, file: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(file, strict=True)
    try:
        for table in reader:
            if None in table or None in table.values():
                raise DataError(f"{path}:{reader.line_num}: not as many fields as the header has")
            yield reader.line_num, table
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: no CSV: {error}") from None


def _json_rows(path: Path, file: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            table = json.loads(text)
        except ValueError as error:
            raise DataError(f"{path}:{number}: no JSON: {error}") from None
        if not isinstance(table, dict):
            raise DataError(f"{path}:{number}: not a JSON object")
        yield number, table


def _from_zero(trace: Trace) -> Trace:
    return trace.part(float(trace.arrival_s[0]), None)


def from_blocks(
    blocks: Sequence[Sequence[Hashable]], prompt_tokens: Ints, block_tokens: int
) -> tuple[Ints, Ints]:
    """`parent` and `shared_tokens` [N] from the ids of each prompt's blocks.

    A block's id stands for it and all before it (as Mooncake's hash_ids do), so two prompts share
    what is before their first unequal id. Only whole blocks count, as in a cache of pages.
    """
    latest: dict[Hashable, int] = {}
    parent = np.full(len(blocks), -1, np.int64)
    shared = np.zeros(len(blocks), np.int64)
    for index, ids in enumerate(blocks):
        whole = ids[: int(prompt_tokens[index]) // block_tokens]
        for depth, block in enumerate(whole, start=1):
            if block not in latest:
                break
            parent[index], shared[index] = latest[block], depth * block_tokens
        latest.update(dict.fromkeys(whole, index))
    return parent, shared


def from_sessions(
    sessions: Sequence[str], prompt_tokens: Ints, output_tokens: Ints
) -> tuple[Ints, Ints]:
    """`parent` and `shared_tokens` [N] from the names of sessions; "" is a session of its own.

    A prompt begins with the whole context of the session's request before it: prompt and answer,
    or as much of it as the prompt is long.
    """
    latest: dict[str, int] = {}
    parent = np.full(len(sessions), -1, np.int64)
    for index, session in enumerate(sessions):
        if session:
            parent[index] = latest.get(session, -1)
            latest[session] = index
    context = prompt_tokens[parent] + output_tokens[parent]
    return parent, np.where(parent < 0, 0, np.minimum(context, prompt_tokens))
