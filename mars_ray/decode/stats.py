"""Counts of an engine since its start, and what live traffic shows about thresholds.

`Snapshot` holds all of it in plain values, which an engine's thread can hand to others.

Every step rates each of its proposals, so it knows how many tokens *each* threshold would have
committed. A committed token that is not the model's own choice is forwarded later as a real token,
and the row before it then shows what that choice was. So these statistics need no extra forward.

Steps of `confidence` without masks, at threshold 1 or where masks do not pay, say nothing of other
thresholds and are left out. While all steps are like that, what a lower threshold would give is
known from the service model alone (`autoscale/service_model.py`).
"""

from collections import Counter, abc
from dataclasses import dataclass, field
from itertools import accumulate
from operator import ne

import numpy as np
from numpy.typing import NDArray

from mars_ray.config.modes import VerifiedMode
from mars_ray.core.tree import children_of
from mars_ray.decode.info import EngineInfo
from mars_ray.decode.scheduler import Work
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies import Plan, Proposals, Rows

# The thresholds for which the tokens that they would have committed are counted.
THRESHOLDS = (0.0, 0.01, 0.03, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_AT_ONCE = 1000


@dataclass(slots=True)
class StepTotals:
    """Sums over all steps; the difference of two readings gives the means over a span."""

    steps: int = 0
    seconds: float = 0.0  # time of whole steps, committing included
    prompt_steps: int = 0  # steps with rows of prompts
    prompt_rows: int = 0  # computed, not found in the prefix cache
    prompts: int = 0  # finished ones
    prompt_tokens: int = 0  # tokens of finished prompts that were computed, as above
    output_tokens: int = 0  # committed, also of requests that were cancelled later
    sequences: int = 0  # decoding ones, counted at every step
    decode_rows: int = 0  # rows of decoding sequences
    # Drafts of `verified` that were checked, and those accepted, by who proposed them: both may
    # have. What a grammar forces has no proposer, so with one only looked-up drafts are counted.
    mask_drafts: int = 0
    mask_accepted: int = 0
    ngram_drafts: int = 0
    ngram_accepted: int = 0
    context_tokens: int = 0  # cached ones of all sequences, counted at every step
    prompt_pairs: int = 0  # of a prompt's row and a token before it

    def add(self, work: abc.Sequence[Work]) -> tuple[int, int]:
        """Count a step, before its tokens are committed. Returns the tokens that its sequences have
        in the cache, and `prompt_pairs`."""
        self.steps += 1
        self.prompt_steps += any(not item.sequence.forwards for item in work)
        context, pairs = sum(item.sequence.cached for item in work), prompt_pairs(work)
        self.context_tokens += context
        self.prompt_pairs += pairs
        for item in work:
            if item.sequence.forwards:
                self.sequences += 1
                self.decode_rows += item.rows
            else:
                self.prompt_rows += item.count
                if item.plan:
                    self.prompts += 1
                    self.prompt_tokens += item.sequence.committed - (item.sequence.found or 0)
        return context, pairs

    def add_drafts(self, sequence: Sequence, plan: Plan, outcome: int) -> None:
        """Count a sequence's drafts, of which those up to a node were accepted."""
        if not plan.drafts or not isinstance(sequence.request.mode, VerifiedMode):
            return
        if not sequence.grammar:
            drafted = {node for node, own in enumerate(plan.confidences, start=1) if own}
            self.mask_drafts += len(drafted)
            self.mask_accepted += len(drafted.intersection(plan.path(outcome)))
        self.ngram_drafts += sum(match is not None for match in plan.matches)
        self.ngram_accepted += plan.looked_up(outcome)


def prompt_pairs(work: abc.Sequence[Work]) -> int:
    """Pairs of a prompt's row in this step and a token before it in the prompt."""
    prompts = [(i.count, i.sequence.cached) for i in work if not i.sequence.forwards]
    return sum(rows * cached + rows * (rows - 1) // 2 for rows, cached in prompts)


@dataclass(slots=True)
class ModeMeasures:
    """Sums over the steps of one mode; they add up over engines."""

    forwards: int = 0  # those that say something of other thresholds
    # Tokens that may differ from the model's own choice, and how many did.
    checked: int = 0
    disagreed: int = 0
    # A proposal is committed at thresholds up to the least value in its step so far. These values
    # are counted, many at a time, by the number of THRESHOLDS that they reach.
    _reached: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(len(THRESHOLDS) + 1, dtype=np.int64)
    )
    _least: list[float] = field(default_factory=list)

    def add_step(self, values: abc.Sequence[float]) -> None:
        """Count a step by its proposals' confidences, or by the ratios that judged its drafts."""
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
        """T/F at each threshold, as far as single steps can show it."""
        forwards = max(1, self.forwards)
        return {t: n / forwards for t, n in zip(THRESHOLDS, self.tokens_at, strict=True)}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine between two steps. Counts are since its start."""

    info: EngineInfo
    running: int
    waiting: int
    cache_share: float  # share of the pages that sequences hold
    preemptions: int
    prefix_queries: int  # tokens of admitted sequences
    prefix_hits: int  # those of them that were in the cache
    windows: tuple[int, ...]  # windows of the sequences in the batch
    adapter: str | None  # the draft adapter in force
    set_point: float  # threshold of requests that pin none, as far as they tolerate it
    step_tokens: int  # most rows of a step
    step_cost: dict[int, float]  # seconds of a step by its rows, as far as measured
    totals: StepTotals
    by_mode: dict[str, ModeMeasures]
    accepted_at: dict[str, list[int]]  # by mode, see LiveMeasures
    discarded_tokens: int = 0  # of totals.output_tokens, those that nobody has read


class LiveMeasures:
    """Measures by mode, fed by the engine with every step of every sequence."""

    def __init__(self) -> None:
        self.by_mode: dict[str, ModeMeasures] = {}
        # By mode: counts of steps by the number of tokens that they committed beyond the first.
        self._beyond: dict[str, Counter[int]] = {}

    @property
    def accepted_at(self) -> dict[str, list[int]]:
        """Tokens that steps committed at each place after their first, by mode."""
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
        tokens: abc.Sequence[int],
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
        elif mode.commits_unseen:
            values, own = proposals.confidences, rows.earlier
            committed = sequence.tokens[-len(own) :] if own else ()
        else:
            return
        disagreed = sum(map(ne, own, committed))
        sequence.disagreed += disagreed
        # A threshold of another measure than the probability is nobody's to move.
        is_movable = mode.verifies or plan.measure == "probability"
        if not (is_movable and (plan.wanted or committed)):
            return
        measures = self.by_mode.get(mode.type)
        if measures is None:
            measures = self.by_mode[mode.type] = ModeMeasures()
        if plan.wanted:
            measures.add_step(values)
        measures.checked += len(committed)
        measures.disagreed += disagreed


def _ratios(plan: Plan, rows: Rows, path: list[int]) -> list[float]:
    """Ratios of the masks' drafts on the path taken, then of the best that follow its end. What
    was looked up is never judged by a threshold."""
    ratios = rows.numbers["ratio"]
    if plan.is_chain and not any(plan.matches):
        return ratios[: len(plan.drafts)]
    children = [
        [child for child in followers if not plan.is_only_looked_up(child)]
        for followers in children_of(plan.parents)
    ]
    path = [0, *(node for node in path if not plan.is_only_looked_up(node))]
    while followers := children[path[-1]]:
        path = [*path, max(followers, key=lambda child: ratios[child - 1])]
    return [ratios[node - 1] for node in path if node]
