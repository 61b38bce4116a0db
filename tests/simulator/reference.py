"""The same engine, step by step: slow, obvious, one replica. Tests compare the fast one to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mars_ray.simulator.engine.arrays import Tables
from mars_ray.simulator.engine.core import NONE_LEFT, step_s
from mars_ray.simulator.traces.trace import Trace


@dataclass(slots=True, eq=False)
class Served:
    """A request, and what has become of it."""

    number: int
    arrival_s: float
    prompt: int
    output: int
    gain: float
    parent: int
    shared: int
    prompt_left: int = field(init=False)
    output_left: float = field(init=False)
    found: int = 0
    first_s: float | None = None
    end_s: float | None = None

    def __post_init__(self) -> None:
        self.prompt_left, self.output_left = self.prompt, float(self.output)

    @property
    def tokens(self) -> int:
        """Tokens that it has in the cache at its end."""
        return self.prompt + self.output

    @property
    def cached(self) -> float:
        """Tokens that it has in the cache now."""
        return self.prompt - self.prompt_left + self.output - self.output_left

    @property
    def is_done(self) -> bool:
        """Whether all of its tokens are there."""
        return self.prompt_left == 0 and self.output_left < NONE_LEFT


@dataclass(slots=True)
class _Replica:
    tables: Tables
    max_batch: int
    served: list[Served]
    now: float = 0.0
    batch: list[Served] = field(default_factory=list)
    ended: list[Served] = field(default_factory=list)  # in order

    def step(self, waiting: list[Served], level: int) -> None:
        """Admit from those who wait, and make one step."""
        tables = self.tables
        decoding = [s for s in self.batch if s.prompt_left == 0]
        rows = len(decoding) * tables.rows_LB[level, len(decoding)]
        room = int(tables.step_tokens - rows)
        while waiting and waiting[0].arrival_s <= self.now and self._has_place(waiting[0], room):
            waiting[0].found = self._found(waiting[0])
            waiting[0].prompt_left -= waiting[0].found
            self.batch.append(waiting.pop(0))
        chunks = self._chunks(room)
        context = sum(s.cached for s in self.batch)
        pairs = sum(
            chunk * (s.prompt - s.prompt_left + chunk / 2)
            for s, chunk in zip(self.batch, chunks, strict=True)
        )
        self.now += step_s(tables, rows + sum(chunks))
        self.now += tables.cache_token_s * context + tables.prompt_attention_s * pairs
        for sequence, chunk in zip(self.batch, chunks, strict=True):
            if sequence in decoding:
                least = min(1.0, tables.rows_LB[level, len(decoding)])
                more = sequence.gain * (tables.tokens_LB[level, len(decoding)] - least)
                tokens = min(least + more, tables.rows_LB[level, len(decoding)])
                sequence.output_left -= min(tokens, sequence.output_left)
            elif chunk:
                sequence.prompt_left -= chunk
                if sequence.prompt_left == 0:
                    sequence.output_left -= 1
                    sequence.first_s = self.now
        for sequence in [s for s in self.batch if s.is_done]:
            sequence.end_s = self.now
            self.batch.remove(sequence)
            self.ended.append(sequence)

    def _chunks(self, room: int) -> list[int]:
        """Rows of each sequence's prompt in the next step: in order, as many as there is room."""
        chunks = []
        for sequence in self.batch:
            chunks.append(min(room, sequence.prompt_left))
            room -= chunks[-1]
        return chunks

    def _promised(self) -> int:
        return sum(s.tokens for s in self.batch)

    def _has_place(self, sequence: Served, room: int) -> bool:
        fits = self._promised() + sequence.tokens <= self.tables.cache_tokens
        prompts = sum(s.prompt_left for s in self.batch)
        return len(self.batch) < self.max_batch and prompts < room and (fits or not self.batch)

    def _found(self, sequence: Served) -> int:
        """Tokens of the sequence's prompt that are in the cache, in whole pages."""
        shared, parent, page = sequence.shared, sequence.parent, self.tables.page_tokens
        while parent >= 0:
            other = self.served[parent]
            if other.first_s is not None and self._holds(other):
                known = other.prompt + (other.output - 1 if other.end_s is not None else 0)
                return min(shared, known, sequence.prompt - 1) // page * page
            shared, parent = min(shared, other.shared), other.parent
        return 0

    def _holds(self, other: Served) -> bool:
        """Whether the cache still has the tokens of another: from the youngest to the oldest of
        those that have ended, it has those that fit beside the batch."""
        if other in self.batch:
            return self._promised() <= self.tables.cache_tokens
        younger = self.ended[self.ended.index(other) :]
        size = sum(s.tokens - s.found for s in younger)
        return size + self._promised() <= self.tables.cache_tokens


def reference(
    trace: Trace,
    tables: Tables,
    max_batch: int,
    level_at: Callable[[float], int],
    gains: Sequence[float],
) -> list[Served]:
    """All requests, served. `level_at` is called at each step; `gains` are of the requests."""
    columns = (
        trace.arrival_s,
        trace.prompt_tokens,
        trace.output_tokens,
        gains,
        trace.parent,
        trace.shared_tokens,
    )
    served = [
        Served(number, float(at), int(prompt), int(output), gain, int(parent), int(shared))
        for number, (at, prompt, output, gain, parent, shared) in enumerate(
            zip(*columns, strict=True)
        )
    ]
    replica, waiting = _Replica(tables, max_batch, served), list(served)
    while waiting or replica.batch:
        if not replica.batch:
            replica.now = max(replica.now, waiting[0].arrival_s)
        replica.step(waiting, level_at(replica.now))
    return served
