"""Decoding modes: the options of each for users, and the facts that an engine needs.

A mode is one class here and one strategy in `decode/strategies.py`. `window` is the number of masks
behind an outcome, `depth` the number of positions that masks were trained for.
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mars_ray.config.base import DISTINCT, Config

Threshold = Annotated[float, Field(ge=0, le=1)]
Measure = Literal["probability", "margin", "entropy"]  # of a proposal's confidence
Window = Annotated[
    int | None, Field(ge=1, le=64, description="masks per step; default: trained depth")
]
# Most drafts of a tree in one step: the drafts that a row sees are the bits of one integer.
MOST_DRAFTS = 63
# Limits of window control: choosing among more would take more time than it saves.
_MOST_BRANCHES, _CONTROLLED_DRAFTS = 4, 16
# Most drafts of a step that are looked up in the sequence's own text.
MOST_NGRAM_DRAFTS = 16


class BaseMode(Config):
    """Facts about a mode, by default of one without masks that commits only what it has seen."""

    # Needs a model with masks of its own, or a draft adapter.
    needs_masks: ClassVar[bool] = False
    # Its steps may have masks, which belong to the draft adapter if one is loaded.
    has_masks: ClassVar[bool] = False
    # Each step verifies the drafts of the previous step.
    has_drafts: ClassVar[bool] = False
    # A step commits tokens that the model might not choose itself, and never verifies them.
    commits_unseen: ClassVar[bool] = False
    # Drafts are accepted by a threshold.
    verifies: ClassVar[bool] = False
    # False for modes that exist only for comparison with the paper.
    is_served: ClassVar[bool] = True
    least_window: ClassVar[int] = 1

    @property
    def own_threshold(self) -> float | None:
        """The mode's threshold; None for modes that have none."""
        return None

    @property
    def is_elastic(self) -> bool:
        """Whether the service may set the threshold of a request that pins none."""
        return self.verifies

    def is_plain_at(self, threshold: float) -> bool:
        """Whether a step at this threshold is one of plain decoding: without masks, as no proposal
        could pass."""
        return False

    @property
    def asked_window(self) -> int:
        """Number of masks of a group as set on the mode; 0 if it is not set."""
        return 0

    def widest(self, depth: int) -> int:
        """Most masks of a group for a model whose masks were trained to this depth."""
        return 0

    def branches_of(self, window: int) -> int:
        """Number of alternatives for a step's first draft, each with a chain of `window` drafts,
        unless window control decides."""
        return 1

    def groups_of(self, window: int) -> int:
        """Number of outcomes of a step that get masks, unless window control decides."""
        return 1

    def most_rows(self, window: int) -> int:
        """Most rows of a decoding step, the last committed token's included."""
        return 1


class _Windowed:
    """Base of modes with a `window` option. Not a Config: each mode declares the field itself."""

    if TYPE_CHECKING:
        window: int | None

    @property
    def asked_window(self) -> int:
        return self.window or 0

    def widest(self, depth: int) -> int:
        return depth if self.window is None else min(self.window, depth)


class _WithThreshold:
    """Base of modes with a `threshold` option. Not a Config either: see `_Windowed`."""

    if TYPE_CHECKING:
        threshold: float

    @property
    def own_threshold(self) -> float | None:
        return self.threshold


class ExactMode(BaseMode):
    """Plain autoregressive decoding: one token per forward."""

    type: Literal["exact"] = "exact"


class VerifiedMode(_Windowed, _WithThreshold, BaseMode):
    """Drafts are verified by the next forward; at threshold 1 the output is that of `exact`."""

    has_masks: ClassVar[bool] = True
    has_drafts: ClassVar[bool] = True
    verifies: ClassVar[bool] = True
    least_window: ClassVar[int] = 0

    type: Literal["verified"] = "verified"
    threshold: Threshold = 1.0
    window: int | None = Field(
        default=None, ge=0, le=64, description="masks of a group; default: trained depth"
    )
    groups: int | None = Field(
        default=None,
        ge=1,
        le=65,
        description="outcomes of a step that get masks, likeliest first; default: as many as pay",
    )
    branches: int | None = Field(
        default=None,
        ge=1,
        le=8,
        description="alternatives for a step's first draft, each with a chain of drafts behind it; "
        "default: as many as pay, and one where the threshold is fixed below 1",
    )
    ngram: bool = Field(
        default=True,
        description="also draft what followed the last tokens where they stood before, in the "
        "prompt or the answer; needs window_control, and threshold 1 in force",
    )

    def branches_of(self, window: int) -> int:
        return max(1, min(self.branches or 1, MOST_DRAFTS // window)) if window else 1

    def groups_of(self, window: int) -> int:
        return min(self.groups or 1, self.branches_of(window) * window + 1)

    def most_rows(self, window: int) -> int:
        return 1 + (self.branches_of(window) + self.groups_of(window)) * window


class ConfidenceMode(_Windowed, _WithThreshold, BaseMode):
    """The paper's rule: commit proposals left to right while their confidence passes.

    By probability the service may set the threshold, and 1 is plain decoding.
    """

    needs_masks: ClassVar[bool] = True
    has_masks: ClassVar[bool] = True
    commits_unseen: ClassVar[bool] = True

    type: Literal["confidence"] = "confidence"
    threshold: Threshold = 0.95
    measure: Measure = "probability"
    window: Window = None

    @property
    def is_elastic(self) -> bool:
        return self.measure == "probability"

    def is_plain_at(self, threshold: float) -> bool:
        # A probability or margin of 1 is one that was rounded to it; entropy is better below 1.
        return threshold == 1 and self.measure != "entropy"

    def most_rows(self, window: int) -> int:
        """Rows for masks, and for the tokens of the last masks, which were committed unseen."""
        return 1 + 2 * window


class BlockCachedMode(_WithThreshold, BaseMode):
    """The paper's block-level cache: rows wait at block boundaries."""

    needs_masks: ClassVar[bool] = True
    has_masks: ClassVar[bool] = True
    commits_unseen: ClassVar[bool] = True
    is_served: ClassVar[bool] = False

    type: Literal["block_cached"] = "block_cached"
    threshold: Threshold = 0.95
    measure: Measure = "probability"
    cache_block: int = Field(default=4, ge=1, le=64, description="tokens per cache block")

    def widest(self, depth: int) -> int:
        return depth

    def most_rows(self, window: int) -> int:
        """Includes the tokens of an unfinished block, which are forwarded again."""
        return self.cache_block + window


class JacobiMode(BaseMode):
    """Fixed-point decoding without masks (Santilli et al., 2023): the output is that of `exact`."""

    has_drafts: ClassVar[bool] = True

    type: Literal["jacobi"] = "jacobi"
    guesses: int = Field(default=4, ge=1, le=64, description="tokens guessed ahead")

    def most_rows(self, window: int) -> int:
        return 1 + self.guesses


Mode = Annotated[
    ExactMode | VerifiedMode | ConfidenceMode | BlockCachedMode | JacobiMode,
    Field(discriminator="type"),
    # A mode that is named only, as in requests, has its defaults.
    BeforeValidator(lambda value: {"type": value} if isinstance(value, str) else value),
]
Modes = Annotated[tuple[Mode, ...], DISTINCT]


def controlled_branches(depth: int) -> int:
    """Most alternatives for the first draft under window control."""
    return max(1, min(_MOST_BRANCHES, _CONTROLLED_DRAFTS // max(1, depth)))


# Room is made for adapters of this depth, which may come while an engine runs.
ADAPTERS_DEPTH = 8


def widest_rows(depth: int) -> int:
    """Number of rows of a step with masks behind every draft that masks make for window control."""
    return VerifiedMode(groups=65, branches=controlled_branches(depth)).most_rows(depth)
