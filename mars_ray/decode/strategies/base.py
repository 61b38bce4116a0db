"""A strategy *plans* what to forward for a sequence, and *absorbs* the results of its rows.

Shape suffixes: N rows of a sequence, V vocabulary.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from mars_ray.core.acceptance import Measure
from mars_ray.core.tree import chain, path_to
from mars_ray.decode.ngram import Match
from mars_ray.decode.sequence import Sequence

# Numbers that a plan may ask for in addition to the token of each real token's row. "ratio" is a
# number per draft: exp(its score in its parent's row - largest score there), which is
# p(draft) / max p at temperature 0 (`core.verification`).
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

    @property
    def branches(self) -> int:
        """Number of tokens that the first mask proposes."""
        return self.sequence.branches

    def branches_of(self, candidates: int) -> int:
        """Number of branches that the head makes of so many candidates."""
        return min(self.branches, candidates) if self.count else 0

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
    log_p_NV: Tensor | None = None  # if the request asks for log-probabilities


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
