"""What a strategy is: *plan* what to forward for a sequence, *absorb* what its rows say.

Shape suffixes: N rows of a sequence, V vocabulary.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from mars_ray.core.accept import Measure
from mars_ray.decode.sequence import Sequence

# Numbers a plan may ask for beside each row's token. "ratio" is exp(score of the draft after the
# row - largest score): p(draft) / max p at temperature 0 (`core.verify`).
Wanted = Measure | Literal["ratio"]


@dataclass(frozen=True, slots=True)
class MaskGroup:
    """Masks that stand behind the first `after` drafts and see nothing of the others."""

    after: int
    masks: int


@dataclass(slots=True)
class Plan:
    """A sequence's rows are [pending | drafts | masks of each group]."""

    drafts: list[int]
    groups: tuple[MaskGroup, ...] = ()
    wanted: tuple[Wanted, ...] = ()
    # Of the pending tokens' rows, those before the last that are read too: the tokens that follow
    # them were committed without them.
    review: int = 0
    rows: int = field(init=False)  # added to the pending tokens

    def __post_init__(self) -> None:
        self.rows = len(self.drafts) + sum(group.masks for group in self.groups)

    def drafts_before(self) -> list[list[int]]:
        """The drafts that stand before each of the rows that are read."""
        causal = [self.drafts[:count] for count in range(len(self.drafts) + 1)]
        masked = [self.drafts[: g.after] for g in self.groups for _ in range(g.masks)]
        return causal + masked

    @property
    def is_causal(self) -> bool:
        """Whether every row sees all rows before it."""
        return len(self.groups) <= 1 and all(g.after == len(self.drafts) for g in self.groups)


@dataclass(frozen=True, slots=True)
class Rows:
    """A sequence's rows from that of its last committed token on: 1 + those that its plan adds."""

    best: list[int]  # the token of each row: the argmax of its scores (`core.sampling`)
    numbers: dict[Wanted, list[float]]  # what the plan wanted
    log_p_NV: Tensor | None = None  # if the request asks for log-probabilities
    earlier: list[int] = field(default_factory=list)  # the tokens of the rows under review


class Strategy(Protocol):
    """Stateless: state lives in the sequence."""

    def drafts_wanted(self, sequence: Sequence) -> int:
        """How many tokens a draft model should add to the sequence's drafts before `plan`."""
        return 0

    def plan(self, sequence: Sequence) -> Plan:
        """What the next forward should hold for this sequence."""
        ...

    def absorb(self, sequence: Sequence, plan: Plan, rows: Rows) -> list[int]:
        """The tokens this forward commits; sets the sequence's next drafts and `cached`."""
        ...
