"""The strategies by mode: each *plans* what to forward for a sequence, and *absorbs* the results.

`confidence` and `block_cached` are the paper's rule: commit proposals at once while their
confidence passes. Masks stand behind the last token, whatever was committed before, and leave
nothing in the cache. The confidence is that of the raw softmax; temperature only changes which
token is taken. At threshold 1 a step is one of plain decoding. Where the service sets the
threshold, it may change between two steps, to 1 and back.

`verified`: drafts of one forward are checked by the causal rows of the next.

    row        [ last committed | draft 1 | draft 2 | mask | mask | ... ]
    predicts     draft 1?         draft 2?  the token after the drafts, then new drafts

The drafts may be a tree (`core.tree`): alternatives for the first draft, each with its successors.
The step's outcome is the node where it ends. Masks behind a whole chain of drafts are useful only
if all drafts are accepted. A group of masks for another outcome stands behind another node, and
sees only the drafts on the path to it.

Shape suffixes: N rows of a sequence, V vocabulary.
"""

from collections import abc
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal, Protocol

from torch import Tensor

from mars_ray.config.modes import (
    BlockCachedMode,
    ConfidenceMode,
    ExactMode,
    JacobiMode,
    Mode,
    VerifiedMode,
)
from mars_ray.core.acceptance import Measure, passes
from mars_ray.core.thresholds import Budget
from mars_ray.core.tree import (
    chain,
    children_of,
    depths_of,
    first_chain,
    likeliest_outcomes,
    path_to,
    renumbered,
)
from mars_ray.decode.ngram import Match
from mars_ray.decode.sequence import Sequence

# Numbers that a plan may ask for in addition to the token of each real token's row. "ratio" is a
# number per draft: exp(its score in its parent's row - largest score there), which is
# p(draft) / max p at temperature 0 (`decode/logits.py: best`).
Wanted = Measure | Literal["ratio"]


@dataclass(frozen=True, slots=True)
class MaskGroup:
    """Masks that stand behind a node (`core.tree`) and see only the drafts on its path."""

    after: int
    masks: int


@dataclass(slots=True)
class Plan:
    """A sequence's rows are [pending | drafts | masks of each group].

    The drafts are a tree (`core.tree`); an outcome is the node where the step ends.
    """

    drafts: list[int]
    groups: tuple[MaskGroup, ...] = ()
    wanted: tuple[Wanted, ...] = ()
    # The confidence measure of the masks' proposals, by the paper's rule; by default it is their
    # probability to be right as drafts.
    measure: Measure | None = None
    # Number of pending tokens' rows before the last that are read too: the tokens after them were
    # committed without these rows.
    review: int = 0
    parents: list[int] = field(default_factory=list)  # of the drafts; by default they are a chain
    confidences: list[float] = field(default_factory=list)  # of the drafts, if they have any
    matches: list[Match | None] = field(default_factory=list)  # of drafts that were looked up
    is_chain: bool = field(init=False)
    masks: int = field(init=False)  # number in all groups
    rows: int = field(init=False)  # number besides the pending tokens

    def __post_init__(self) -> None:
        self.masks = sum(group.masks for group in self.groups)
        self.rows = len(self.drafts) + self.masks
        own = chain(len(self.drafts))
        self.parents = self.parents or own
        self.is_chain = self.parents == own

    def path(self, outcome: int) -> list[int]:
        """The drafts that are accepted if the step ends at this node, by their numbers."""
        return chain(outcome + 1)[1:] if self.is_chain else path_to(self.parents, outcome)

    def tokens(self, outcome: int) -> list[int]:
        """The drafts on the path to a node."""
        return [self.drafts[node - 1] for node in self.path(outcome)]

    def masks_behind(self, outcome: int) -> slice:
        """The slice of its masks that stand behind a node."""
        start = 0
        for group in self.groups:
            if group.after == outcome:
                return slice(start, start + group.masks)
            start += group.masks
        return slice(0, 0)

    def looked_up(self, outcome: int, count: int | None = None) -> int:
        """Of the (first `count`) drafts up to a node those that the n-gram lookup proposed."""
        if not self.matches:
            return 0
        return sum(self.matches[node - 1] is not None for node in self.path(outcome)[:count])

    def is_only_looked_up(self, node: int) -> bool:
        """Whether no mask proposed this draft."""
        return bool(self.matches and self.matches[node - 1] and not self.confidences[node - 1])

    @property
    def is_judged(self) -> bool:
        """Whether a threshold decides what the step commits: drafts, or masks by a measure."""
        return bool(self.drafts or (self.measure and self.masks))

    @property
    def is_causal(self) -> bool:
        """Whether every row sees all rows before it."""
        at_end = all(group.after == len(self.drafts) for group in self.groups)
        return self.is_chain and len(self.groups) <= 1 and at_end


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a sequence's nodes: its last committed token, then its drafts."""

    best: list[int]  # the token of each row: the argmax of its scores (`core.sampling`)
    numbers: dict[Wanted, list[float]]  # those that the plan asked for
    log_p_NV: Tensor | None = None  # if the request asks for log-probabilities
    earlier: list[int] = field(default_factory=list)  # the tokens of the rows under review


@dataclass(frozen=True, slots=True)
class Masks:
    """A sequence's masks behind an outcome."""

    sequence: Sequence
    plan: Plan
    outcome: int  # the node before them
    token: int  # the token that the outcome's row predicts
    own: slice  # their rows among those that are read; empty if there are none

    @property
    def count(self) -> int:
        """Number of masks."""
        return self.own.stop - self.own.start

    def branches_of(self, candidates: int) -> int:
        """Number of branches that the head makes of so many candidates."""
        return min(self.sequence.branches, candidates) if self.count else 0

    @property
    def is_told(self) -> bool:
        """Whether events tell the proposals' log-probabilities: those of drafts are not told."""
        return self.plan.measure is not None and self.sequence.request.logprobs is not None

    @property
    def answer(self) -> list[int]:
        """The final tokens of the answer before them, without guesses."""
        sequence = self.sequence
        answer = sequence.tokens[len(sequence.request.prompt) :]
        return answer + self.plan.tokens(self.outcome)


@dataclass(frozen=True, slots=True)
class Proposals:
    """The proposals of the masks behind a step's outcome; empty if there are none."""

    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)  # see the plan's measure
    parents: list[int] = field(default_factory=list)  # of the tokens, which are a tree
    log_p_NV: Tensor | None = None  # if `Masks.is_told`


class Strategy(Protocol):
    """How a mode decodes. It has no state: that lives in the sequence."""

    def plan(self, sequence: Sequence) -> Plan:
        """The rows that the next forward should hold for this sequence."""
        ...

    def outcome(self, sequence: Sequence, plan: Plan, rows: Rows) -> int:
        """The node where the step ends, 0 if no draft is accepted; the sequence stays as it is."""
        return 0

    def absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, outcome: int, proposals: Proposals
    ) -> list[int]:
        """The tokens this forward commits; sets the sequence's next drafts and `cached`."""
        ...


class Exact(Strategy):
    """Plain autoregressive decoding: one token per forward."""

    def plan(self, sequence: Sequence) -> Plan:
        return Plan([])

    def absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, outcome: int, proposals: Proposals
    ) -> list[int]:
        sequence.cached = sequence.committed
        return rows.best[:1]


class Confidence(Strategy):
    """Up to window + 1 tokens per forward; at threshold 1 one, without masks."""

    def plan(self, sequence: Sequence) -> Plan:
        return self._plan(sequence, sequence.window)

    def absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, outcome: int, proposals: Proposals
    ) -> list[int]:
        """Commit the row's own token, and the proposals before the first that does not pass."""
        sequence.cached = sequence.committed
        threshold, measure = sequence.threshold, plan.measure
        assert measure
        passed = takewhile(lambda number: passes(number, threshold, measure), proposals.confidences)
        return [rows.best[0], *proposals.tokens[: sum(1 for _ in passed)]]

    def _plan(self, sequence: Sequence, masks: int) -> Plan:
        masks = min(masks, sequence.remaining - 1)
        # The first token of a commit is the causal row's own and needs no review.
        review = min(sequence.last_commit, len(sequence.pending)) - 1
        groups = (MaskGroup(0, masks),) if masks else ()
        mode = sequence.request.mode
        assert isinstance(mode, ConfidenceMode | BlockCachedMode)
        measure = mode.measure
        # A step of plain decoding costs what one of `exact` does, so it measures nothing: at
        # threshold 1, or by window control's choice, which in this mode is to have no masks.
        wanted = () if sequence.is_plain or sequence.choice else (measure,)
        return Plan([], groups, wanted, measure, max(0, review))


class BlockCached(Confidence):
    """Decodes with the paper's way of caching, but never waits for rows of other sequences.

    No step reaches over the end of a cache block, and the cache grows by whole blocks. So the
    tokens of an unfinished block are forwarded again in every step.
    """

    def plan(self, sequence: Sequence) -> Plan:
        _, end = _cache_block(sequence)
        return self._plan(sequence, min(sequence.window, end - sequence.committed - 1))

    def absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, outcome: int, proposals: Proposals
    ) -> list[int]:
        # The part of the unfinished block that is already in the cache is forgotten.
        begin, cached = _cache_block(sequence)[0], sequence.cached
        tokens = super().absorb(sequence, plan, rows, outcome, proposals)
        sequence.cached = max(cached, begin)
        return tokens


def _cache_block(sequence: Sequence) -> tuple[int, int]:
    """Begin and end of the answer's cache block that contains the next token."""
    assert isinstance(sequence.request.mode, BlockCachedMode)
    size = sequence.request.mode.cache_block
    begin = sequence.committed - (sequence.committed - len(sequence.request.prompt)) % size
    return begin, begin + size


class Jacobi(Strategy):
    """Guesses are replaced by their rows' predictions until both agree, left to right: the baseline
    of the paper's appendix C, which needs no MARS training and gains little."""

    def plan(self, sequence: Sequence) -> Plan:
        return Plan(sequence.drafts[: sequence.remaining])

    def outcome(self, sequence: Sequence, plan: Plan, rows: Rows) -> int:
        agree = [best == draft for best, draft in zip(rows.best, plan.drafts, strict=False)]
        return [*agree, False].index(False)

    def absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, outcome: int, proposals: Proposals
    ) -> list[int]:
        sequence.cached = sequence.committed + outcome
        mode = sequence.request.mode
        assert isinstance(mode, JacobiMode)
        # The next guesses are the later rows' predictions, and then repeats of the last token.
        guesses = rows.best[outcome + 1 :]
        filler = guesses[-1] if guesses else rows.best[outcome]
        sequence.drafts = guesses + [filler] * (mode.guesses - len(guesses))
        return [*plan.drafts[:outcome], rows.best[outcome]]


class Verified(Strategy):
    """Verifies drafts. After an outcome without masks, one step has no drafts.

    Whether greedy or sampled, a row has one token (`core.sampling`). At threshold 1 a draft is
    accepted only if it is that token, so the output is that of `exact` whatever the drafts were.
    """

    def plan(self, sequence: Sequence) -> Plan:
        if choice := sequence.choice:
            # Without drafts that are gone since an earlier choice.
            masks = {0: choice.masks[0]}
            for node, count in zip(choice.nodes, choice.masks[1:], strict=True):
                if node <= len(sequence.drafts) and sequence.draft_parents[node - 1] in masks:
                    masks[node] = count
            counts = enumerate(masks.values())
            groups = tuple(MaskGroup(after, count) for after, count in counts if count)
            return _plan(sequence, [node for node in masks if node], groups)
        if sequence.groups > 1:
            # Nothing is cut at the limit, since that would change which outcomes are likeliest.
            parents, window = sequence.draft_parents, sequence.window
            outcomes = likeliest_outcomes(sequence.draft_probabilities, sequence.groups, parents)
            groups = tuple(MaskGroup(after, window) for after in outcomes if window)
            return _plan(sequence, range(1, len(parents) + 1), groups)
        # Drafts up to the limit, even one for the last token, which needs no draft. So a shorter
        # limit gives a prefix of the text of a longer one, also with relaxed acceptance.
        depths = depths_of(sequence.draft_parents)
        nodes = [n for n in range(1, len(depths)) if depths[n] <= sequence.remaining]
        plan = _plan(sequence, nodes)
        end = first_chain(plan.parents)
        masks = min(sequence.window, max(0, sequence.remaining - end - 1))
        return replace(plan, groups=(MaskGroup(end, masks),)) if masks else plan

    def outcome(self, sequence: Sequence, plan: Plan, rows: Rows) -> int:
        """The last accepted draft. The path goes from each node to the draft that is its row's
        token, or below threshold 1 to the best that passes, while the request's budget allows."""
        budget = sequence.request.quality
        answer = sequence.committed - len(sequence.request.prompt)
        disagreed, ratios = sequence.disagreed, rows.numbers["ratio"]
        children, node, depth = children_of(plan.parents), 0, 0
        while followers := children[node]:
            equal = (child for child in followers if plan.drafts[child - 1] == rows.best[node])
            child = next(equal, None)
            if child is None:
                child = max(followers, key=lambda follower: ratios[follower - 1])
                if sequence.threshold == 1 or ratios[child - 1] < sequence.threshold:
                    break
                if isinstance(budget, Budget) and not budget.allows(disagreed, answer + depth + 1):
                    break
                disagreed += 1
            node, depth = child, depth + 1
        return node

    def absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, outcome: int, proposals: Proposals
    ) -> list[int]:
        accepted = plan.tokens(outcome)
        sequence.cached = sequence.committed + len(accepted)
        sequence.set_drafts(proposals.tokens, proposals.confidences, proposals.parents)
        return [*accepted, rows.best[outcome]]


def _plan(sequence: Sequence, nodes: abc.Sequence[int], groups: tuple[MaskGroup, ...] = ()) -> Plan:
    """A plan with these of the sequence's drafts."""
    return Plan(
        [sequence.drafts[node - 1] for node in nodes],
        groups,
        ("ratio",),
        parents=renumbered(sequence.draft_parents, nodes),
        confidences=[sequence.draft_probabilities[node - 1] for node in nodes],
        matches=[sequence.draft_matches[node - 1] for node in nodes],
    )


STRATEGIES: dict[type[Mode], Strategy] = {
    ExactMode: Exact(),
    ConfidenceMode: Confidence(),
    VerifiedMode: Verified(),
    BlockCachedMode: BlockCached(),
    JacobiMode: Jacobi(),
}


def strategy_of(sequence: Sequence) -> Strategy:
    """The strategy that decodes this sequence."""
    return STRATEGIES[type(sequence.request.mode)]
