"""What a grammar does to a sequence's tokens (`decode/structured_output.py` has the real one).

Rows of one token after another are masked by the grammar's state before them, so they never have
a token that it forbids. A mask's row stands behind tokens that nobody knows yet: it is not masked,
and what it proposes is kept up to the first token that the grammar forbids.

Shape suffixes: R rows, V vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class GrammarState(Protocol):
    """Where one answer stands in its grammar."""

    def allowed(self, back: int, tokens: Sequence[int]) -> NDArray[np.bool_]:
        """(R, V): what may follow each of the last `back` tokens but one, the answer so far, and
        each of `tokens` behind it. Rows behind a forbidden token are all True."""
        ...

    def admissible(self, tokens: Sequence[int]) -> int:
        """How many of them, from the first one on, the grammar lets follow."""
        ...

    def forced(self) -> list[int]:
        """The tokens of the only text that can follow; none if there is a choice."""
        ...

    def consume(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these."""
        ...


class Grammar(Protocol):
    """Compiled; shared by all answers of a request."""

    def start(self) -> GrammarState:
        """At the beginning of an answer."""
        ...
