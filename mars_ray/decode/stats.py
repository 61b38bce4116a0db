"""What an engine has done since its start, and what live traffic says about the threshold.

`Snapshot` is all of it in plain values, as an engine's own thread hands it to others.

Every step sees how good each of its proposals is, so it knows how many tokens *each* threshold
would have committed in it; and a token that was committed without being the model's own choice is
forwarded as a real token anyway, when the row before it tells what that choice would have been. So
this takes no forward of its own.
"""

from collections import Counter
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import accumulate
from operator import ne

import numpy as np
from numpy.typing import NDArray

from mars_ray.core.tree import children_of
from mars_ray.decode.info import EngineInfo
from mars_ray.decode.scheduler import Work
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import Plan, Proposals, Rows

# The grid on which is counted what other thresholds would have committed.
THRESHOLDS = (0.0, 0.01, 0.03, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_AT_ONCE = 1000


@dataclass(slots=True)
class StepTotals:
    """Sums over all steps: means over any span are differences of two readings."""

    steps: int = 0
    seconds: float = 0.0  # of whole steps, with what they commit
    prompt_steps: int = 0  # that had rows of prompts
    prompt_rows: int = 0  # computed, not found in the prefix cache
    prompts: int = 0  # done
    prompt_tokens: int = 0  # of those that are done; computed, as above
    sequences: int = 0  # decoding, one count per step
    decode_rows: int = 0  # of those

    def add(self, work: Several[Work]) -> None:
        """Count a step, before its tokens are committed."""
        self.steps += 1
        self.prompt_steps += any(not item.sequence.forwards for item in work)
        for item in work:
            if item.sequence.forwards:
                self.sequences += 1
                self.decode_rows += item.rows
            else:
                self.prompt_rows += item.count
                if item.plan:
                    self.prompts += 1
                    self.prompt_tokens += item.sequence.committed - (item.sequence.found or 0)


@dataclass(slots=True)
class ModeMeasures:
    """Sums over the steps of one mode; additive over engines."""

    forwards: int = 0
    # Tokens that need not have been the model's own choice, and how many were not.
    checked: int = 0
    disagreed: int = 0
    # A proposal is committed at thresholds up to the least value so far. Those are counted by the
    # number of THRESHOLDS they reach, many at a time.
    _reached: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(len(THRESHOLDS) + 1, dtype=np.int64)
    )
    _least: list[float] = field(default_factory=list)

    def add_step(self, values: Several[float]) -> None:
        """Count a step by its proposals' confidences, or by what its drafts were judged by."""
        self.forwards += 1
        self._least += accumulate(values, min)
        if len(self._least) > _AT_ONCE:
            self._count()

    @property
    def tokens_at(self) -> list[int]:
        """Tokens that each of THRESHOLDS would have committed in these steps."""
        self._count()
        committed = self._reached[:0:-1].cumsum()[::-1] + self.forwards
        return committed.tolist()

    def _count(self) -> None:
        reached = np.searchsorted(THRESHOLDS, self._least, side="right")
        self._reached += np.bincount(reached, minlength=len(self._reached))
        self._least.clear()

    def tokens_per_forward(self) -> dict[float, float]:
        """The curve of T/F over thresholds, as far as single steps can tell it."""
        forwards = max(1, self.forwards)
        return {t: n / forwards for t, n in zip(THRESHOLDS, self.tokens_at, strict=True)}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine between two steps. Counts are since its start."""

    info: EngineInfo
    running: int
    waiting: int
    cache_share: float  # of the pages, those that sequences hold
    preemptions: int
    prefix_queries: int  # tokens of admitted sequences
    prefix_hits: int  # those of them that were in the cache
    windows: tuple[int, ...]  # of the sequences in the batch
    adapter: str | None  # the draft adapter in force
    can_draft: bool  # by it, or by the model itself
    set_point: float  # threshold of requests that pin none, as far as they tolerate it
    step_cost: dict[int, float]  # seconds of a step by its rows, as far as they are measured
    totals: StepTotals
    by_mode: dict[str, ModeMeasures]
    accepted_at: dict[str, list[int]]  # by mode, see LiveMeasures


class LiveMeasures:
    """Measures by mode, fed by the engine with every step of every sequence."""

    def __init__(self) -> None:
        self.by_mode: dict[str, ModeMeasures] = {}
        # By mode, steps by how many tokens they committed beyond the first.
        self._beyond: dict[str, Counter[int]] = {}

    @property
    def accepted_at(self) -> dict[str, list[int]]:
        """Tokens that steps committed at every place beyond their first, by mode."""
        return {
            mode: [sum(n for count, n in steps.items() if count > at) for at in range(max(steps))]
            for mode, steps in self._beyond.items()
        }

    def observe(
        self,
        sequence: Sequence,
        plan: Plan,
        rows: Rows,
        outcome: int,
        proposals: Proposals,
        tokens: Several[int],
    ) -> None:
        """Count a sequence's step, before its `tokens` are committed."""
        mode = sequence.request.mode
        if len(tokens) > 1:
            self._beyond.setdefault(mode.type, Counter())[len(tokens) - 1] += 1
        if mode.verifies:
            path = plan.path(outcome)
            values = _ratios(plan, rows, path)
            committed = tokens[: len(path)]  # the accepted drafts
            own = [rows.best[node] for node in (0, *path)]
        elif mode.commits_unseen and plan.measure == "probability":
            values, own = proposals.confidences, rows.earlier
            committed = sequence.tokens[-len(own) :] if own else ()
        else:
            return
        measures = self.by_mode.get(mode.type)
        if measures is None:
            measures = self.by_mode[mode.type] = ModeMeasures()
        measures.add_step(values)
        if committed:
            disagreed = sum(map(ne, own, committed))
            measures.checked += len(committed)
            measures.disagreed += disagreed
            sequence.disagreed += disagreed


def _ratios(plan: Plan, rows: Rows, path: list[int]) -> list[float]:
    """Ratios of the drafts on the path that was taken, and from its end of the best that follow."""
    ratios = rows.numbers["ratio"]
    if plan.is_chain:
        return ratios[: len(plan.drafts)]
    children, path = children_of(plan.parents), path or [0]
    while followers := children[path[-1]]:
        path = [*path, max(followers, key=lambda child: ratios[child - 1])]
    return [ratios[node - 1] for node in path if node]
