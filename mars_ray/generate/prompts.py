"""Prompts of a generation: those of its sources, and those that the model writes itself.

An instruct model that is given its chat template up to the start of a user's message continues with
what users ask (Magpie, arXiv 2406.08464). Tries are numbered, and each has its own seed, so that
the choice among them depends neither on the number of engines nor on interruptions.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from mars_ray.config.decode import Sampling
from mars_ray.config.generate import GenerateJob, OwnPrompts
from mars_ray.data import files
from mars_ray.data.chat import ChatEncoder, UserTurn, beginning_key, text_key, texts_of
from mars_ray.data.sources import BROKEN, BadRows, Message, Record, read_prompts
from mars_ray.decode.request import Completion, Request
from mars_ray.errors import DataError

# Prompts encoded in one call.
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that waits for an answer, as messages and as the model's token ids."""

    messages: tuple[Message, ...]
    origin: str
    ids: np.ndarray  # int32 (L,)

    @property
    def is_own(self) -> bool:
        return self.origin.startswith(OWN_ORIGIN)


# Origin prefix of the model's own prompts, before their number.
OWN_ORIGIN = "own:"


@dataclass(frozen=True, slots=True)
class SourcePrompts:
    """The prompts of the sources, and where those that are none came from."""

    prompts: list[Prompt]
    excluded: list[str]  # origins
    bad: list[tuple[str, str]]  # origins and reasons


def read_sources(
    job: GenerateJob, encoder: ChatEncoder, excluded: frozenset[bytes]
) -> SourcePrompts:
    """The prompts of all sources but the model's own. Raises DataError if a source cannot be read
    or too many of its rows are bad."""
    report = BadRows()
    sources = [source for source in job.prompts if not isinstance(source, OwnPrompts)]
    records = [record for source in sources for record in read_prompts(source, report)]
    kept, out = [], []
    for record in records:
        if is_excluded(record.messages, excluded):
            out.append(record.origin)
        else:
            kept.append(record)
    prompts = list(encoded(kept, encoder, report))
    report.check(job.max_bad_share)
    if not prompts and len(sources) == len(job.prompts):
        raise DataError(
            f"there are no prompts: {report.bad} of {report.seen} rows are bad, and "
            f"{len(out)} are excluded"
        )
    return SourcePrompts(prompts, out, report.reasons)


def encoded(records: Iterable[Record], encoder: ChatEncoder, report: BadRows) -> Iterator[Prompt]:
    """The prompts as the model reads them; those that the template refuses go to `report`."""
    rest = iter(records)
    while chunk := list(islice(rest, _CHUNK)):
        taken, plans = [], []
        for record in chunk:
            try:
                plans.append(encoder.plan_prompt(record.messages))
            except DataError as error:
                report.add(record.origin, str(error))
            else:
                taken.append(record)
        for record, tokens in zip(taken, encoder.encode(plans), strict=True):
            yield Prompt(record.messages, record.origin, tokens.input_ids)


def excluded_keys(paths: Iterable[str]) -> frozenset[bytes]:
    """Keys of every text in these files, whatever its field is called. Raises DataError."""
    keys: set[bytes] = set()
    for origin, row in files.rows(tuple(paths)):
        if isinstance(row, ValueError):
            raise DataError(f"{origin} is to be excluded, and is not JSON: {row}")
        texts = list(texts_of(row))
        keys.update(map(text_key, texts))
        if isinstance(row, dict) and "instruction" in row:
            # Instructions are asked together with their inputs, wherever in the row those are.
            keys.update(text_key(f"{row['instruction']} {text}") for text in texts)
    # All texts without words share one key.
    return frozenset(keys - {text_key("")})


def is_excluded(messages: Iterable[Message], excluded: frozenset[bytes]) -> bool:
    """Whether a message of a user is one of the excluded texts."""
    users = (message.content for message in messages if message.role == "user")
    return bool(excluded) and any(text_key(text) in excluded for text in users)


# Least share of the wanted prompts: with fewer, the result is far from what was asked for.
_LEAST_SHARE = 0.5
# The number of further tries follows from the share of usable ones so far, plus a margin.
_LEAST_RATE, _MARGIN = 0.1, 8


@dataclass(frozen=True, slots=True)
class Try:
    """One sample: its text, or the fault that makes it unusable as a prompt."""

    text: str
    fault: str = ""


def requests_of(
    source: OwnPrompts, job: GenerateJob, turn: UserTurn, numbers: Iterable[int]
) -> Iterator[Request]:
    for number in numbers:
        # Far enough apart that the seeds of two sources never coincide.
        seed = (source.seed << 32) + number
        sampling = Sampling(temperature=source.temperature, top_p=source.top_p, seed=seed)
        stops = frozenset({turn.end_id})
        yield Request(str(number), turn.before, job.mode, sampling, source.max_new_tokens, stops)


def tried(completion: Completion, turn: UserTurn, encoder: ChatEncoder) -> Try:
    """The text of a completion, or a fault that does not depend on other tries."""
    *tokens, last = completion.tokens
    if completion.finish_reason != "stop":
        return Try("", "not ended")
    if last != turn.end_id:
        return Try("", "ended by another token")
    text = encoder.decode(tokens).strip()
    if encoder.special_ids.intersection(tokens) or encoder.has_special(text):
        return Try("", "special tokens")
    if not text:
        return Try("", "empty")
    return Try("", "broken characters") if BROKEN in text else Try(text)


@dataclass(slots=True)
class Choice:
    """Accepts tries in their order until there are enough prompts."""

    source: OwnPrompts
    excluded: frozenset[bytes]
    seen: set[bytes]  # beginnings of existing prompts
    records: list[Record] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    tries: int = 0

    @property
    def more(self) -> int:
        """Number of tries to make now; 0 when done."""
        missing = self.source.count - len(self.records)
        left = self.source.count * self.source.tries_per_prompt - self.tries
        if missing <= 0 or not self.tries:
            return max(0, min(missing, left))
        rate = max(len(self.records) / self.tries, _LEAST_RATE)
        return min(int(missing / rate) + _MARGIN, left)

    @property
    def is_promising(self) -> bool:
        """Whether about one try in ten was usable so far."""
        return self.tries * _LEAST_RATE < len(self.records) + 1

    def take(self, attempts: Iterable[Try]) -> None:
        """Takes the next tries; those beyond the wanted number are not counted."""
        for attempt in attempts:
            if len(self.records) == self.source.count:
                return
            if fault := attempt.fault or self._fault(attempt.text):
                self.faults[fault] += 1
            else:
                turns = (Message("user", attempt.text),)
                self.records.append(Record(turns, f"{OWN_ORIGIN}{self.tries}"))
            self.tries += 1

    def check(self) -> None:
        """Raises DataError if far too few tries are usable."""
        if len(self.records) < self.source.count * _LEAST_SHARE:
            why = ", ".join(f"{count} {fault}" for fault, count in self.faults.most_common())
            raise DataError(
                f"the model writes too few prompts: {len(self.records)} of {self.tries} tries are "
                f"usable ({why}), and {self.source.count} are wanted. Give it prompts of a file, "
                "or lower count or temperature, or raise max_new_tokens or tries_per_prompt"
            )

    def _fault(self, text: str) -> str:
        if is_excluded([Message("user", text)], self.excluded):
            return "excluded"
        key = beginning_key(text)
        if key in self.seen:
            return "duplicate"
        self.seen.add(key)
        return ""
