"""Which rows of a forward are drafts and masks, and whose masks become the next drafts.

    request            A           B (prompt)    C
    speculative        [7 8 M M]   []            [M M]
    rows of forward    0 1 2 3 4   5 6 7 8       9 10 11
                       a 7 8 M M   prompt        c M M
    rows of logits     0 1 2 3 4   5             6 7 8
    real ones          0 1 2       5             6

Masks stand behind a request's last draft. They continue its answer only if all drafts before them
were accepted; then the next step checks what they propose. Otherwise that step has no drafts.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

# vLLM's own padding of speculative tokens: never accepted, unknown to grammars and penalties.
MASK = -1


@dataclass(frozen=True, slots=True)
class Row:
    """The speculative tokens of a request in a step."""

    drafts: tuple[int, ...]
    masks: int
    padding: int = 0  # behind the masks: rows that nobody reads

    @property
    def length(self) -> int:
        """Number of rows with logits: the last token's, too."""
        return 1 + len(self.drafts) + self.masks + self.padding


def parsed(speculative: Sequence[int], depths: int) -> Row:
    """The row that these speculative tokens make; at most `depths` of its paddings are masks."""
    drafts = tuple(takewhile(lambda token: token >= 0, speculative))
    rest = len(speculative) - len(drafts)
    return Row(drafts, min(rest, depths), max(0, rest - depths))


@dataclass(frozen=True, slots=True)
class Origin:
    """Masks that continue an answer: they propose the next step's drafts."""

    request: int  # its place in the batch
    first: int  # the first mask's row among the logits
    masks: int
    token: int  # the answer's last token, before what the first mask predicts


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of all requests in a forward, in the batch's order."""

    rows: tuple[Row, ...]
    ends: tuple[int, ...]  # where each request's rows end in the forward

    @property
    def decodes(self) -> bool:
        """Whether there are no rows of prompts."""
        starts = (0, *self.ends)
        return all(
            end - start == row.length
            for row, start, end in zip(self.rows, starts, self.ends, strict=False)
        )

    def masks(self) -> tuple[list[int], list[int]]:
        """Places of all masks in the forward, and their depths, which count from 0."""
        places: list[int] = []
        depths: list[int] = []
        for row, end in zip(self.rows, self.ends, strict=True):
            first = end - row.padding - row.masks
            places += range(first, first + row.masks)
            depths += range(row.masks)
        return places, depths

    def real_logits(self, drafts: Sequence[Sequence[int]]) -> list[int]:
        """Places among the logits of each request's last token, and of these of its drafts: the
        first of the row."""
        places: list[int] = []
        start = 0
        for row, own in zip(self.rows, drafts, strict=True):
            places += range(start, start + 1 + len(own))
            start += row.length
        return places

    def origins(self, sampled: Sequence[Sequence[int]]) -> list[Origin]:
        """The masks that continue what was sampled: those behind drafts that were all accepted."""
        found: list[Origin] = []
        start = 0
        for request, (row, tokens) in enumerate(zip(self.rows, sampled, strict=True)):
            if row.masks and len(tokens) == len(row.drafts) + 1:
                first = start + 1 + len(row.drafts)
                found.append(Origin(request, first, row.masks, tokens[-1]))
            start += row.length
        return found


def laid_out(
    requests: Iterable[str],
    scheduled: Mapping[str, int],
    speculative: Mapping[str, Sequence[int]],
    depths: int,
) -> Layout:
    """The layout of a forward: `scheduled` says how many rows each request of the batch has."""
    rows: list[Row] = []
    ends: list[int] = []
    end = 0
    for request in requests:
        rows.append(parsed(speculative.get(request, ()), depths))
        end += scheduled[request]
        ends.append(end)
    return Layout(tuple(rows), tuple(ends))


def next_speculative(
    sampled: Sequence[Sequence[int]], drafts: Mapping[int, Sequence[int]], masks: int
) -> list[list[int]]:
    """The speculative tokens of each request's next step: drafts by place in the batch, then masks.

    A request that has sampled nothing is in the middle of its prompt, and gets none.
    """
    return [
        [*drafts.get(request, ()), *[MASK] * masks] if tokens else []
        for request, tokens in enumerate(sampled)
    ]


def masks_for(running: int, most: int, limits: Sequence[tuple[int, int]]) -> int:
    """Masks of each request when so many run: `limits` holds pairs `(from so many on, masks)`."""
    allowed = [masks for least, masks in sorted(limits) if running >= least]
    return min([most, *allowed[-1:]])


# Requests that have ended are kept for who asks late.
_ENDED = 1024


@dataclass(slots=True)
class Counts:
    """Counts of one request, or of all. A forward of several requests counts for each of them."""

    forwards: int = 0  # that gave tokens
    forwards_with_drafts: int = 0
    forwards_with_masks: int = 0
    tokens: int = 0
    drafted: list[int] = field(default_factory=list)  # by depth
    accepted: list[int] = field(default_factory=list)

    def add(self, drafts: int, masks: int, tokens: int) -> None:
        """Count a forward that checked these drafts."""
        self.forwards += 1
        self.forwards_with_drafts += drafts > 0
        self.forwards_with_masks += masks > 0
        self.tokens += tokens
        missing = drafts - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for depth in range(drafts):
            self.drafted[depth] += 1
            self.accepted[depth] += depth < tokens - 1


class MarsCounts:
    """Counts since the start, and of each request since its own.

    Tokens behind a stop are counted, too: vLLM cuts an answer where it ends only after the step.
    """

    def __init__(self) -> None:
        self.total = Counts()
        self.steps = 0  # forwards of the model, whatever the number of requests in them
        self._running: dict[str, Counts] = {}
        self._ended: OrderedDict[str, Counts] = OrderedDict()

    def add(
        self, requests: Sequence[str], layout: Layout, sampled: Sequence[Sequence[int]]
    ) -> None:
        """Count a forward, given what each request of the batch has sampled."""
        self.steps += 1
        for request, row, tokens in zip(requests, layout.rows, sampled, strict=True):
            if tokens:
                for counts in (self.total, self._running.setdefault(request, Counts())):
                    counts.add(len(row.drafts), row.masks, len(tokens))

    def ended(self, requests: Iterable[str]) -> None:
        """Note the requests that have finished or were aborted."""
        for request in requests:
            if counts := self._running.pop(request, None):
                self._ended[request] = counts
        while len(self._ended) > _ENDED:
            self._ended.popitem(last=False)

    def to_json(self) -> dict[str, Any]:
        """All counts, with those of requests by their ids in vLLM."""
        requests = self._running | self._ended
        return {
            "steps": self.steps,
            "total": asdict(self.total),
            "requests": {name: asdict(counts) for name, counts in requests.items()},
        }
