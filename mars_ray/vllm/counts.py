"""What steps did: forwards, tokens, and drafts accepted by depth; in total and by request."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mars_ray.vllm.rows import Layout

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

    def to_json(self) -> dict[str, Any]:
        """As a dictionary of numbers and lists."""
        return asdict(self)


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

    def of(self, request: str) -> Counts | None:
        """A request's counts: one that is running, or has ended lately."""
        return self._running.get(request) or self._ended.get(request)

    def to_json(self) -> dict[str, Any]:
        """All counts, with those of requests by their ids in vLLM."""
        requests = self._running | self._ended
        return {
            "steps": self.steps,
            "total": self.total.to_json(),
            "requests": {name: counts.to_json() for name, counts in requests.items()},
        }
