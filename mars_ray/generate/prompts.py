"""Prompts of the job's sources, without the excluded ones."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from mars_ray.config.generate import GenerateJob, OwnPrompts
from mars_ray.data import files
from mars_ray.data.chat import ChatEncoder, Message
from mars_ray.data.sources import BadRows, Record, read_prompts
from mars_ray.data.texts import text_key, texts_of
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
        """Whether the model has written it."""
        return self.origin.startswith(OWN_ORIGIN)


# Origin prefix of the model's own prompts, before their number.
OWN_ORIGIN = "own:"


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompts of the sources, and where those that are none came from."""

    prompts: list[Prompt]
    excluded: list[str]  # origins
    bad: list[tuple[str, str]]  # origins and reasons


def read_sources(job: GenerateJob, encoder: ChatEncoder, excluded: frozenset[bytes]) -> Asked:
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
    return Asked(prompts, out, report.reasons)


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
