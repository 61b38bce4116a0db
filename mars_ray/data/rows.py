"""Tokenised conversations: built once, kept on disk, memory-mapped.

A cache directory holds three arrays and, written last, a description to check them against:

    tokens.bin    int32, all conversations one after another
    response.bin  bool, the same length
    starts.bin    int64, where each conversation starts, and the end
    meta.json
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerBase

from mars_ray.config.inputs import DataConfig, FilesSource, HubSource, Source
from mars_ray.data import files
from mars_ray.data.chat import ChatEncoder, Encoded, Plan, encoder_of
from mars_ray.data.sources import BROKEN, BadRows, Record, read
from mars_ray.errors import DataError
from mars_ray.files import clear_abandoned, remedy
from mars_ray.progress import Bars

log = logging.getLogger(__name__)

T = TypeVar("T")

_ARRAYS = {"tokens": np.int32, "response": np.bool_, "starts": np.int64}
# Begins the name of a cache that is not whole yet.
_BUILDING = ".building-"
# Delay before the number of conversations is shown, and the interval of its updates.
_QUIET_S = 2.0
_UPDATE_EVERY = 256
# Conversations encoded in one call, which spreads them over the cores.
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of what happened to the rows of a source."""

    conversations: int
    tokens: int
    bad: int
    dropped: int  # longer than max_length, by the setting or because no answer was left
    truncated: int
    content: str  # a digest of all tokens and of which are a response


class Conversations:
    """The conversations of a cache directory, read as they are asked for."""

    def __init__(self, directory: Path) -> None:
        """Raises ValueError, OSError or TypeError if the directory is not a whole cache."""
        meta = json.loads((directory / "meta.json").read_text())
        self.directory = directory
        self.summary = Summary(**meta)
        sizes = {"tokens": self.summary.tokens, "response": self.summary.tokens}
        sizes["starts"] = self.summary.conversations + 1
        for name, size in sizes.items():
            expected = size * np.dtype(_ARRAYS[name]).itemsize
            if (found := (directory / f"{name}.bin").stat().st_size) != expected:
                raise ValueError(f"{name}.bin has {found} bytes where {expected} belong")
        self._tokens = np.memmap(directory / "tokens.bin", np.int32, "r")
        self._response = np.memmap(directory / "response.bin", np.bool_, "r")
        self._starts = np.fromfile(directory / "starts.bin", np.int64)
        self.lengths = np.diff(self._starts)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled as its directory: a mapped array would be copied.
        return Conversations, (self.directory,)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def fingerprint(self) -> str:
        """A digest of every token and of where each conversation starts."""
        content = self.summary.content.encode()
        return hashlib.sha256(content + self.lengths.tobytes()).hexdigest()[:16]

    def __getitem__(self, index: int) -> Encoded:
        if not 0 <= index < len(self):
            raise IndexError(index)
        span = slice(self._starts[index], self._starts[index + 1])
        return Encoded(self._tokens[span], self._response[span])


class Joined(Conversations):
    """The conversations of two caches as one data set, the first cache's first."""

    def __init__(self, first: Conversations, second: Conversations) -> None:
        self._parts = first, second
        self.lengths = np.concatenate([first.lengths, second.lengths])

    def __reduce__(self) -> tuple[Any, ...]:
        return Joined, self._parts

    @property
    def fingerprint(self) -> str:
        """A digest of both parts."""
        both = "-".join(part.fingerprint for part in self._parts)
        return hashlib.sha256(both.encode()).hexdigest()[:16]

    def __getitem__(self, index: int) -> Encoded:
        first, second = self._parts
        return first[index] if index < len(first) else second[index - len(first)]


def tokenize(
    source: Source, tokenizer: PreTrainedTokenizerBase, config: DataConfig, cache_dir: Path
) -> Conversations:
    """The source's conversations, from the cache if it has them.

    Several processes may call this at once. Raises DataError if the source cannot be read, has
    more bad rows than allowed, no conversation is left, or the cache cannot be written.
    """
    directory = cache_dir / _key(source, tokenizer, config)
    try:
        conversations = Conversations(directory)
    except (ValueError, TypeError, OSError) as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("rebuilding the damaged cache %s: %s", directory, error)
        conversations = _built(source, tokenizer, config, directory)
    _tell(conversations.summary, source, config)
    return conversations


def _built(
    source: Source, tokenizer: PreTrainedTokenizerBase, config: DataConfig, directory: Path
) -> Conversations:
    cache_dir = directory.parent
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        clear_abandoned(cache_dir, f"{_BUILDING}*")
        with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=cache_dir) as work:
            _build(source, encoder_of(tokenizer), config, Path(work) / "new")
            _put(Path(work), directory)
        return Conversations(directory)
    except OSError as error:
        raise DataError(
            f"cannot keep tokenised data in {cache_dir}: {error}. {remedy(error)}, or name "
            "another data.cache_dir, and run again"
        ) from error


def _tell(summary: Summary, source: Source, config: DataConfig) -> None:
    """Logs what was left out, at every start, also for data from the cache."""
    if not (summary.bad or summary.dropped or summary.truncated):
        return
    name = source.type
    if isinstance(source, FilesSource):
        name = ", ".join(source.paths)
    elif isinstance(source, HubSource):
        name = source.name
    log.warning(
        "%s: %d conversations, %d of them cut at max_length = %d; left out: %d bad rows, "
        "%d too long",
        name,
        summary.conversations,
        summary.truncated,
        config.max_length,
        summary.bad,
        summary.dropped,
    )


def _put(work: Path, directory: Path) -> None:
    """Moves the new cache to its place, if no other process was faster."""
    if directory.exists():
        try:
            Conversations(directory)
            return
        except (ValueError, TypeError, OSError):
            os.replace(directory, work / "damaged")
    try:
        os.replace(work / "new", directory)
    except OSError:
        # Fine if another process has put its own there, which has the same content.
        if not directory.exists():
            raise


def _build(source: Source, encoder: ChatEncoder, config: DataConfig, directory: Path) -> None:
    directory.mkdir()
    report = BadRows()
    content = hashlib.sha256()
    starts = [0]
    dropped = truncated = 0
    with ExitStack() as stack:
        tokens = stack.enter_context((directory / "tokens.bin").open("wb"))
        response = stack.enter_context((directory / "response.bin").open("wb"))
        records = stack.enter_context(counted(read(source, report), "tokenising"))
        for encoded in _encode_all(records, encoder, report):
            ids = encoded.input_ids[: config.max_length]
            marks = encoded.response[: config.max_length]
            if len(ids) < len(encoded.input_ids):
                if config.overlong == "drop" or not marks.any():  # no answer is left
                    dropped += 1
                    continue
                truncated += 1
            ids.tofile(tokens)
            marks.tofile(response)
            content.update(ids.tobytes())
            content.update(marks.tobytes())
            starts.append(starts[-1] + len(ids))
    report.check(config.max_bad_share)
    if len(starts) == 1:
        raise DataError(
            f"no conversation is left of {report.seen} rows: {report.bad} are bad, {dropped} do "
            f"not fit max_length = {config.max_length}"
        )
    np.array(starts, np.int64).tofile(directory / "starts.bin")
    summary = Summary(
        len(starts) - 1, starts[-1], report.bad, dropped, truncated, content.hexdigest()
    )
    (directory / "meta.json").write_text(json.dumps(asdict(summary)))


def _encode_all(
    records: Iterable[Record], encoder: ChatEncoder, report: BadRows
) -> Iterator[Encoded]:
    """The records' tokens; records that the chat template refuses go to `report`."""
    rest = iter(records)
    while chunk := list(islice(rest, _CHUNK)):
        plans = []
        for record in chunk:
            try:
                plans.append(
                    _token_plan(record, encoder)
                    if record.prompt_ids
                    else encoder.plan(record.messages)
                )
            except DataError as error:
                report.add(record.origin, str(error))
        yield from encoder.encode(plans)


def _token_plan(record: Record, encoder: ChatEncoder) -> Plan:
    """The record's own tokens, of which the answer is the response.

    Raises DataError if the ids are visibly of another tokenizer: if there are messages, the ids
    must decode to the last one.
    """
    prompt, answer, messages = record.prompt_ids, record.answer_ids, record.messages
    if (most := max(*prompt, *answer)) >= encoder.vocabulary:
        raise DataError(
            f"token {most} is beyond the tokenizer's {encoder.vocabulary}: the ids are of another "
            "model"
        )
    # An answer may have been cut after its text was written.
    said = encoder.decode(answer).rstrip(BROKEN)
    if messages and not messages[-1].content.startswith(said):
        raise DataError(
            "answer_ids do not say what the last message says: they are of another model's "
            "tokenizer, or the text was changed. Use the model that wrote them, or leave the ids "
            "out"
        )
    return [*((token, False) for token in prompt), *((token, True) for token in answer)]


def _key(source: Source, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> str:
    """A key of everything the tokens depend on, this package's own source included."""
    here = Path(__file__).parent
    own = sorted(path for path in here.iterdir() if path.suffix in (".py", ".toml"))
    content: list[str] = []
    if isinstance(source, FilesSource):
        content = [files.checksum(path) for path in files.expand(source.paths)]
    elif isinstance(source, HubSource):
        content = files.hub_fingerprint(source)
    parts = [
        source.model_dump_json(),
        *content,
        encoder_of(tokenizer).fingerprint(),
        json.dumps([config.max_length, config.overlong, config.max_bad_share]),
        *(path.read_text(encoding="utf-8") for path in own),
    ]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()[:32]


@contextmanager
def counted(items: Iterable[T], label: str) -> Iterator[Iterator[T]]:
    """The items; after two seconds their number is shown on stderr."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description} {task.completed}"),
        TimeElapsedColumn(),
    )
    bars = Bars(Console(stderr=True), *columns, transient=True)
    try:
        yield _counting(items, bars, label)
    finally:
        bars.stop()


def _counting(items: Iterable[T], bars: Bars, label: str) -> Iterator[T]:
    begin = time.monotonic()
    task = bars.add_task(label, total=None)
    for count, item in enumerate(items, start=1):
        yield item
        if count % _UPDATE_EVERY == 0:
            bars.update(task, completed=count)
            if time.monotonic() - begin > _QUIET_S:
                bars.start()
