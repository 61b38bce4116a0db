"""The rows that the next forward holds, and which sequence gives way when pages run out."""

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from mars_ray.config.decode import PROMPTS_SHARE, EngineConfig
from mars_ray.decode.kv_cache import PagePool, content_hashes
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies import Plan, strategy_of


def decoding_rows(step_tokens: int) -> int:
    """Rows of a step of so many that decoding sequences may fill whatever else waits."""
    return step_tokens - step_tokens // PROMPTS_SHARE


@dataclass(slots=True)
class Work:
    """A sequence's part of a forward: `count` of its pending tokens, then the rows of its plan.

    Without a plan it is a chunk of a prompt whose rows nobody reads.
    """

    sequence: Sequence
    count: int
    plan: Plan | None
    rows: int = field(init=False)  # positions in flight
    masks: int = field(init=False)  # those of them that are masks

    def __post_init__(self) -> None:
        self.rows = self.count + (self.plan.rows if self.plan else 0)
        self.masks = self.plan.masks if self.plan else 0


class Scheduler:
    """Sequences wait, then run; a running one may be sent back to wait, never dropped.

    A sequence's rows depend on the other sequences, but its text does not: a plan is forwarded
    whole or not at all, and a sequence that is sent back keeps its drafts.
    """

    def __init__(self, config: EngineConfig, pool: PagePool) -> None:
        self._config = config
        self.step_tokens = config.step_tokens  # rows of a step; it may be lowered
        self._pool = pool
        self._steps = 0
        self._arrivals = 0
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._running: dict[int, Sequence] = {}  # by arrival
        self.preemptions = 0
        # Tokens of admitted sequences, and how many of them were in the cache.
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def running(self) -> int:
        """Number of sequences that hold pages."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of sequences that hold no pages."""
        return len(self._waiting)

    def all(self) -> Iterator[Sequence]:
        """All sequences, running or waiting."""
        yield from self._running.values()
        yield from (sequence for _, sequence in self._waiting)

    def running_sequences(self) -> list[Sequence]:
        """All sequences that hold pages."""
        return list(self._running.values())

    def next_sequences(self) -> list[Sequence]:
        """Sequences of the next step if there is room for all: running and newly admitted ones."""
        room = self._config.max_batch - self.running
        coming = heapq.nsmallest(room, self._waiting) if room and self._waiting else []
        return [*self._running.values(), *(sequence for _, sequence in coming)]

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind those of its priority."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free what it holds."""
        if self._running.pop(sequence.arrival, None):
            self._free(sequence)
        else:
            self._waiting = [item for item in self._waiting if item[1] is not sequence]
            heapq.heapify(self._waiting)

    def schedule(self) -> list[Work]:
        """The next forward's work, at most `step_tokens` rows; empty only without sequences.

        Decoding sequences go before prompts, so a long prompt fills the rows that they leave. While
        a prompt waits, they always leave some. One decoding sequence has its rows in any case.
        """
        self._steps += 1
        work: dict[int, Work] = {}
        budget = self.step_tokens
        # Whether a prompt is being forwarded, or may be admitted.
        comes = bool(self._waiting) and self.running < self._config.max_batch
        has_prompts = comes or any(map(_is_prompt, self._running.values()))
        kept = budget - decoding_rows(budget) if has_prompts else 0
        for sequence in sorted(self._running.values(), key=_turn):
            # A sequence before it may have caused it to be sent back.
            if sequence.arrival in self._running:
                # The first may take all rows: it could be larger than the share for decoding.
                room = budget if _is_prompt(sequence) else budget - kept
                if not work and not _is_prompt(sequence):
                    room = self._config.step_tokens
                budget -= self._enter(sequence, max(0, room), work)
        while self._waiting and budget > 0 and self.running < self._config.max_batch:
            sequence = self._waiting[0][1]
            if not self._admit(sequence):
                break
            budget -= self._enter(sequence, budget, work)
            if sequence.arrival not in self._running:
                break  # there was no room after all, so nothing more is admitted in this step
        for item in work.values():
            sequence = item.sequence
            if not sequence.served:
                sequence.queue_s = time.monotonic() - sequence.submitted_s
            sequence.served = self._steps
        return list(work.values())

    def publish(self, sequence: Sequence) -> None:
        """Let other sequences share the pages that are full and final by now."""
        if not self._config.prefix_cache:
            return
        final = min(sequence.cached, sequence.committed)
        new = slice(sequence.published, final // self._config.page_size)
        if new.start < new.stop:
            contents = self._contents(sequence, final)
            for page, content in zip(sequence.pages[new], contents[new], strict=True):
                self._pool.publish(page, content)
            sequence.published = new.stop

    def check(self) -> None:
        """Assert what must hold between steps: no page is lost or held twice."""
        for sequence in self.all():
            sequence.check()
        assert all(not sequence.pages for _, sequence in self._waiting)
        size = self._config.page_size
        for sequence in self._running.values():
            assert sequence.cached <= len(sequence.pages) * size
        self._pool.check([sequence.pages for sequence in self._running.values()])

    def _item(self, sequence: Sequence, budget: int) -> Work | None:
        """The part of a sequence that fits the budget."""
        pending = sequence.committed - sequence.cached
        if pending <= budget:
            item = Work(sequence, pending, strategy_of(sequence).plan(sequence))
            if item.rows <= budget:
                return item
        count = min(budget, pending - 1)
        return Work(sequence, count, None) if count else None

    def _enter(self, sequence: Sequence, budget: int, work: dict[int, Work]) -> int:
        """Add a sequence's item with the pages it needs; returns the rows that this costs.

        Others, or even the sequence itself, may have to give way; the rows they free are negative.
        """
        item = self._item(sequence, budget)
        if item is None:
            return 0
        cost = item.rows
        missing = self._pages_for(sequence.cached + item.rows) - len(sequence.pages)
        while (pages := self._pool.take(max(0, missing))) is None:
            victim = max(self._running.values(), key=lambda other: other.order)
            # Its pages' contents are computed again, or found if they are kept.
            del self._running[victim.arrival]
            self._free(victim)
            heapq.heappush(self._waiting, (victim.order, victim))
            self.preemptions += 1
            if victim is sequence:
                return cost - item.rows
            given_back = work.pop(victim.arrival, None)
            cost -= given_back.rows if given_back else 0
        sequence.pages += pages
        work[sequence.arrival] = item
        return cost

    def _admit(self, sequence: Sequence) -> bool:
        """Let the first in the queue run, if there is room for all that it has to forward."""
        # The last token's row itself is needed, not only its keys and values.
        before = sequence.committed - 1
        # Of tokens that are found again there are no rows, which say their log-probabilities.
        has_all_rows = sequence.request.prompt_logprobs is not None and not sequence.forwards
        is_looked_up = self._config.prefix_cache and not has_all_rows
        contents = self._contents(sequence, before) if is_looked_up else []
        shared = self._pool.share(contents)
        rows = len(sequence.drafts) + sequence.masks
        needed = self._pages_for(sequence.committed + rows)
        if needed - len(shared) > self._pool.available and self._running:
            self._pool.release(reversed(shared))  # as in `_free`
            return False
        sequence.pages, sequence.published = shared, len(shared)
        sequence.cached = len(shared) * self._config.page_size
        if sequence.found is None:
            sequence.found = sequence.cached
        self.prefix_queries += sequence.committed
        self.prefix_hits += sequence.cached
        heapq.heappop(self._waiting)
        self._running[sequence.arrival] = sequence
        return True

    def _free(self, sequence: Sequence) -> None:
        self.publish(sequence)
        # Its first pages are taken last: those behind them are worth nothing without them.
        self._pool.release(reversed(sequence.pages))
        sequence.pages, sequence.published, sequence.cached = [], 0, 0

    def _contents(self, sequence: Sequence, count: int) -> list[bytes]:
        """Hashes of the full pages of its first `count` tokens; none is computed twice."""
        full = count // self._config.page_size
        if full > len(sequence.hashes):
            tokens = sequence.tokens[:count]
            sequence.hashes = content_hashes(tokens, self._config.page_size, sequence.hashes)
        return sequence.hashes[:full]

    def _pages_for(self, places: int) -> int:
        return -(-places // self._config.page_size)


def _turn(sequence: Sequence) -> tuple[bool, int, int, int]:
    """The order of sequences: decoding before prompts, then by priority, then by time waited."""
    return _is_prompt(sequence), sequence.request.priority, sequence.served, sequence.arrival


def _is_prompt(sequence: Sequence) -> bool:
    return sequence.forwards == 0
