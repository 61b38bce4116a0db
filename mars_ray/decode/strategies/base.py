"""What a strategy is: *plan* what to forward for a sequence, *absorb* what its rows say.

Shape suffixes: N rows of one sequence, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from mars_ray.core.accept import Measure
from mars_ray.decode.sequence import Sequence

# Numbers a plan may ask for beside each row's argmax. "ratio": p of the draft after the row over
# the row's largest p.
Wanted = Measure | Literal["ratio"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A sequence's row is [pending | drafts | masks]."""

    drafts: list[int]
    masks: int
    wanted: Wanted | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """A sequence's rows from that of its last committed token on: 1 + drafts + masks of them."""

    best: list[int]  # argmax
    numbers: list[float] | None  # what the plan wanted
    logits_NV: Tensor  # for those who sample; on the device

    def slice(self, start: int, end: int | None = None) -> Tensor:
        """Logits of some rows."""
        return self.logits_NV[start:end]


class Strategy(Protocol):
    """Stateless: state lives in the sequence."""

    def plan(self, sequence: Sequence) -> Plan:
        """What the next forward should hold for this sequence."""
        ...

    def absorb(self, sequence: Sequence, plan: Plan, rows: Rows) -> list[int]:
        """The tokens this forward commits; sets the sequence's next drafts and `cached`."""
        ...


def positions(sequence: Sequence, count: int, ahead: int = 0) -> Tensor:
    """Positions of `count` tokens that start `ahead` places after the last committed one."""
    start = sequence.committed + ahead
    return torch.arange(start, start + count)
