"""Loads the trace that a source describes: from files, from ServeGen's clients, or generated.

Files are of our own schema, or of two published ones. The schema has `arrival_s`, `prompt_tokens`,
`output_tokens`, and optionally `priority`, `deadline_s`, `pinned_threshold`, `session`, as columns
of a CSV or keys of JSON lines. An unusable row is an error that names file and line, because a
trace with gaps would be a different load.

ServeGen (github.com/alibaba/ServeGen) publishes no requests, but a rate and a fitted distribution
(`law`) of the gaps between arrivals, by client and window of ten minutes; each client has its own
rate, burstiness and token counts. The laws do not keep the rate, so the gaps of a window are scaled
to give the rate's number of requests, as in ServeGen.

What is generated has Poisson arrivals whose rate is a function of time.
"""

import csv
import gzip
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mars_ray.errors import DataError
from mars_ray.simulator.config import (
    AzureTrace,
    FileTrace,
    FlashTrace,
    Lengths,
    MooncakeTrace,
    RampTrace,
    ServeGenTrace,
    SineTrace,
    TraceSource,
)
from mars_ray.simulator.traces.trace import Floats, Ints, Trace, resampled


def load_trace(source: TraceSource, seed: int) -> Trace:
    """The source's trace; the same seed gives the same one. Raises DataError.

    Seed 0 is a recorded trace as it was recorded, other seeds draw from it; what is generated is
    generated anew by every seed.
    """
    rng = np.random.default_rng([seed, 1])
    match source:
        case ServeGenTrace():
            trace = servegen(source, source.resample and seed > 0, rng)
        case FileTrace() | AzureTrace() | MooncakeTrace():
            recorded = _READERS[source.type](source.path)
            recorded = recorded.part(float(recorded.arrival_s[0]), None)  # from 0 on
            trace = resampled(
                recorded.part(source.start_s, source.duration_s),
                source.rate_factor,
                source.resample and seed > 0,
                rng,
            )
        case RampTrace() | FlashTrace() | SineTrace():
            trace = _generated(source, rng).part(source.start_s, source.duration_s)
    return trace.spread(source.spread_s, rng)


def _generated(source: RampTrace | FlashTrace | SineTrace, rng: np.random.Generator) -> Trace:
    """A trace by thinning arrivals at the highest rate (Lewis and Shedler, 1979)."""
    match source:
        case RampTrace(rates_rps=rates, stage_s=stage_s):
            stages = np.array(rates)
            most_rps, duration_s = stages.max(), len(stages) * stage_s

            def rate(times: Floats) -> Floats:
                return stages[np.minimum(times / stage_s, len(stages) - 1).astype(int)]

        case FlashTrace():
            most_rps, duration_s = max(source.base_rps, source.peak_rps), source.duration_s

            def rate(times: Floats) -> Floats:
                inside = (times >= source.from_s) & (times < source.to_s)
                return np.where(inside, source.peak_rps, source.base_rps)

        case SineTrace(low_rps=low, high_rps=high, period_s=period_s):
            middle, swing = (low + high) / 2, (high - low) / 2
            most_rps, duration_s = middle + abs(swing), source.duration_s

            def rate(times: Floats) -> Floats:  # begins at the lowest
                return middle - swing * np.cos(2 * math.pi * times / period_s)

    lengths = source.lengths
    count = rng.poisson(most_rps * source.rate_factor * duration_s)
    times = np.sort(rng.random(count)) * duration_s
    times = times[rng.random(count) * most_rps < rate(times)]
    prompts = token_counts(lengths.prompt_mean, lengths, len(times), rng)
    outputs = token_counts(lengths.output_mean, lengths, len(times), rng)
    return Trace(source.type, times, prompts, outputs)


def token_counts(mean: float, lengths: Lengths, count: int, rng: np.random.Generator) -> Ints:
    """Token counts, log-normal with this mean before they are cut."""
    variance = math.log1p(lengths.cv**2)
    values = rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
    return np.clip(np.round(values), 1, lengths.limit).astype(np.int64)


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
        unknown = table.keys() - _REQUIRED - _OPTIONAL.keys()
        if unknown:
            raise ValueError(f"unknown column {min(map(str, unknown))!r}")
        given = {key: value for key, value in table.items() if value not in ("", None)}
        required = (given["arrival_s"], given["prompt_tokens"], given["output_tokens"])
        priority, deadline_s, pinned, session = (given.get(k, v) for k, v in _OPTIONAL.items())
        values = _row(*required, priority, deadline_s, pinned)
        if not isinstance(session, str | int):
            raise ValueError(f"session {session!r} is neither a text nor a whole number")
        sessions.append(str(session))
        return values

    trace = _from_file(path, "mars-ray's trace schema", row)
    parent, shared = from_sessions(sessions, trace.prompt_tokens, trace.output_tokens)
    return replace(trace, parent=parent, shared_tokens=shared)


def read_azure(path: str | Path) -> Trace:
    """Azure's LLM traces of 2023: TIMESTAMP, ContextTokens, GeneratedTokens. Raises DataError."""

    def row(table: dict[str, Any]) -> Row:
        moment = datetime.fromisoformat(table["TIMESTAMP"]).timestamp()
        return _row(moment, table["ContextTokens"], table["GeneratedTokens"])

    return _from_file(path, "Azure's LLM trace", row)


def read_mooncake(path: str | Path) -> Trace:
    """Mooncake's traces: timestamp, input_length, output_length, hash_ids. Raises DataError."""
    blocks: list[list[int]] = []

    def row(table: dict[str, Any]) -> Row:
        blocks.append([_whole(block) for block in table["hash_ids"]])
        return _row(table["timestamp"] / 1000, table["input_length"], table["output_length"])

    trace = _from_file(path, "Mooncake's trace", row)
    parent, shared = from_blocks(blocks, trace.prompt_tokens, _BLOCK_TOKENS)
    return replace(trace, parent=parent, shared_tokens=shared)


_READERS: dict[str, Callable[[str], Trace]] = {
    "file": read_trace,
    "azure": read_azure,
    "mooncake": read_mooncake,
}


def _from_file(path: str | Path, what: str, row: Callable[[dict[str, Any]], Row]) -> Trace:
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


@dataclass(frozen=True, slots=True)
class Window:
    """Rate and gaps of one client in one window."""

    client: int
    start_s: float
    rate_rps: float
    law: str  # distribution of the gaps: Gamma or Weibull
    shape: float


@dataclass(frozen=True, slots=True)
class Counts:
    """Token counts with their cumulative probabilities."""

    tokens: Ints
    cumulated: Floats

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        place = np.searchsorted(self.cumulated, rng.random(count) * self.cumulated[-1], "right")
        return self.tokens[np.minimum(place, len(self.tokens) - 1)]


# Token counts and their shares, window by window, by client.
_Shares = dict[int, list[tuple[Ints, Floats]]]


def servegen(source: ServeGenTrace, resample: bool, rng: np.random.Generator) -> Trace:
    """The clients' requests in the source's own slice and rate. Raises DataError.

    With `resample` the clients are drawn. A client without its own token counts draws from those
    of the others, weighted by their rates (as published, whoever was drawn).
    """
    windows = [
        window
        for window in read_windows(source.rates_path)
        if window.start_s + source.window_s > source.start_s
        and window.start_s < source.start_s + source.duration_s
    ]
    if not windows:
        raise DataError(f"{source.rates_path}: no client between the chosen seconds")
    times, clients = [], []
    for window in drawn_clients(windows, rng) if resample else windows:
        arrivals = window_arrivals(window, source.window_s, source.rate_factor, rng)
        times.append(arrivals - source.start_s)
        clients.append(np.full(len(arrivals), window.client))
    merged = np.concatenate(times)
    if not len(merged):
        raise DataError(f"{source.rates_path}: no request at rate_factor {source.rate_factor:g}")
    order = np.argsort(merged, kind="stable")
    prompts, outputs = _token_counts(source, windows, np.concatenate(clients)[order], rng)
    name = Path(source.rates_path).name.split("_")[0]
    return Trace(name, merged[order], prompts, outputs).part(0, source.duration_s)


def drawn_clients(windows: list[Window], rng: np.random.Generator) -> list[Window]:
    """As many draws of clients as there are clients, by their mean rates, with replacement.

    Every draw brings an equal share of the total rate, so the total stays while its parts change:
    a client's rate is multiplied by how often it was drawn over how often that was to be expected.
    """
    rates = _rates(windows)
    share = np.array(list(rates.values())) / sum(rates.values())
    weight = rng.multinomial(len(rates), share) / (len(rates) * share)
    weights = dict(zip(rates, weight.tolist(), strict=True))
    return [
        replace(window, rate_rps=window.rate_rps * weights[window.client])
        for window in windows
        if weights[window.client]
    ]


def window_arrivals(
    window: Window, window_s: float, rate_factor: float, rng: np.random.Generator
) -> Floats:
    """Arrivals of one client in one window: the number given by its rate, with its law's gaps.

    A fraction of a request becomes a request with that probability.
    """
    expected = window.rate_rps * rate_factor * window_s
    count = int(expected) + (rng.random() < expected - int(expected))
    if window.law == "Weibull":
        gaps = rng.weibull(window.shape, count + 1)
    else:
        gaps = rng.gamma(window.shape, size=count + 1)
    # A very bursty law may draw only gaps that are 0 in floating point.
    ends = np.cumsum(gaps + 1e-12)
    return window.start_s + window_s * ends[:-1] / ends[-1]


def read_windows(path: str | Path) -> list[Window]:
    """The merged rates file, gzipped or not. Raises DataError."""
    windows = []
    for line, row in enumerate(csv.DictReader(_lines(path)), start=2):
        try:
            windows.append(
                Window(
                    int(row["client_id"]),
                    float(row["window_start_s"]),
                    float(row["rate_rps"]),
                    row["pattern"],
                    float(row["param1"]),
                )
            )
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(f"{path}:{line}: not a window of ServeGen: {error!r}") from None
        if windows[-1].law not in ("Gamma", "Weibull") or windows[-1].shape <= 0:
            raise DataError(f"{path}:{line}: a law that is neither Gamma nor Weibull")
    return windows


def read_lengths(path: str | Path) -> dict[int, tuple[Counts, Counts]]:
    """The merged token counts of prompts and outputs by client, all windows of one together. Raises
    DataError."""
    columns = ("input_tokens", "output_tokens")
    found: tuple[_Shares, _Shares] = (defaultdict(list), defaultdict(list))
    for line, text in enumerate(_lines(path), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
            for key, shares in zip(columns, found, strict=True):
                tokens = np.array(list(map(int, row[key])), np.int64)
                shares[row["client_id"]].append((tokens, np.array([*row[key].values()], float)))
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise DataError(f"{path}:{line}: no token counts of ServeGen: {error!r}") from None
    prompts, outputs = ({who: _counts(parts) for who, parts in own.items()} for own in found)
    usable = [who for who in sorted(prompts) if len(prompts[who].tokens) * len(outputs[who].tokens)]
    return {client: (prompts[client], outputs[client]) for client in usable}


def _counts(parts: list[tuple[Ints, Floats]]) -> Counts:
    """The sum of a client's windows."""
    tokens, place = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
    shares = np.bincount(place, np.concatenate([part[1] for part in parts]), len(tokens))
    return Counts(np.maximum(tokens, 1), np.cumsum(shares, dtype=np.float64))


def _token_counts(
    source: ServeGenTrace, windows: list[Window], clients: Ints, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """Prompt and output tokens of requests of these clients [N]."""
    lengths = read_lengths(source.lengths_path)
    known = {client: rate for client, rate in _rates(windows).items() if client in lengths}
    if not known:
        raise DataError(f"{source.lengths_path}: no token counts of the clients of these windows")
    rates = np.array(list(known.values()))
    strange = ~np.isin(clients, list(known))
    owners = clients.copy()
    owners[strange] = rng.choice(list(known), int(strange.sum()), p=rates / rates.sum())
    prompts, outputs = np.empty_like(clients), np.empty_like(clients)
    for client in np.unique(owners).tolist():
        own = owners == client
        for tokens, counts in zip((prompts, outputs), lengths[client], strict=True):
            tokens[own] = counts.draw(int(own.sum()), rng)
    return prompts, outputs


def _rates(windows: list[Window]) -> dict[int, float]:
    """The rate of each client, added up over its windows."""
    rates: dict[int, float] = defaultdict(float)
    for window in windows:
        rates[window.client] += window.rate_rps
    return dict(rates)


def _lines(path: str | Path) -> list[str]:
    try:
        data = Path(path).expanduser().read_bytes()
        text = gzip.decompress(data) if str(path).endswith(".gz") else data
        return text.decode("utf-8-sig").splitlines()
    except FileNotFoundError:
        raise DataError(missing(path)) from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
