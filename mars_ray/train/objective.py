"""From a batch of tokens to the layout that a stage's objective trains on."""

from dataclasses import dataclass

from mars_ray.config.train import ArObjective, DraftObjective, MarsObjective, StageConfig
from mars_ray.core.draft_layout import draft_layout
from mars_ray.core.layout import (
    Layout,
    TokenBatch,
    clean_layout,
    compact_layout,
    paper_layout,
    with_own_answers,
)
from mars_ray.core.mask_schedule import ar_weight, block_starts, depth_weights, draft_blocks

_LAYOUTS = {"compact": compact_layout, "paper": paper_layout}
_CLEAN, _NOISY = 0, 1


@dataclass(frozen=True, slots=True)
class Stream:
    """A logged mean: one of a step's two sums, divided by one of the `loss_counts`."""

    name: str
    sum: int
    count: int


@dataclass(frozen=True, slots=True)
class StageObjective:
    """An objective bound to a seed and to the model's mask token.

    `progress` is the share of the stage that is done, in [0, 1).
    """

    config: ArObjective | MarsObjective | DraftObjective
    seed: int
    mask_token_id: int | None  # None for a plain model, whose masks are an adapter's
    own_from: int | None = None  # the first conversation whose answer is the model's own
    has_head: bool = False  # whether a draft adapter has a sequential head

    @classmethod
    def of(
        cls, stage: StageConfig, seed: int, mask_token_id: int | None, own_from: int | None = None
    ) -> "StageObjective":
        has_head = stage.adapter is not None and stage.adapter.head_size != 0
        return cls(stage.objective, seed, mask_token_id, own_from, has_head)

    def layout(self, batch: TokenBatch, progress: float) -> Layout:
        """The rows of one forward, on the batch's device."""
        if isinstance(self.config, ArObjective):
            return clean_layout(batch)
        if isinstance(self.config, DraftObjective):
            sizes_BL = draft_blocks(batch, self.config, self.config.grids, progress, self.seed)
            return draft_layout(batch, sizes_BL, depth_weights(self.config))
        assert self.mask_token_id is not None, "a plain model has no mask token"
        starts_BL = block_starts(batch, self.config, progress, self.seed)
        if self.own_from is not None and self.config.noisy_on != "all":
            starts_BL = starts_BL.masked_fill(batch.document_BL < self.own_from, -1)
        lay_out = _LAYOUTS[self.config.layout]
        layout = lay_out(batch, starts_BL, depth_weights(self.config), self.mask_token_id)
        if self.own_from is None:
            return layout
        return with_own_answers(layout, self.own_from, self.config.anchor_weight or 0.0)

    def ar_weight(self, progress: float) -> float:
        """Weight of the clean stream's mean loss."""
        return ar_weight(self.config, progress) if isinstance(self.config, MarsObjective) else 1.0

    def loss(self, means: dict[str, float], progress: float) -> float:
        match self.config:
            case ArObjective():
                return means["clean_ce"]
            case MarsObjective():
                return means["noisy_ce"] + self.ar_weight(progress) * means["clean_ce"]
            case DraftObjective(row_loss_weight=row, head_loss_weight=head):
                of_head = head * means["head_loss"] if self.has_head else 0.0
                return row * means["row_loss"] + of_head

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The means that make up the loss."""
        if isinstance(self.config, DraftObjective):
            head = Stream("head_loss", 0, _NOISY)
            row = Stream("row_loss", 1, _NOISY)
            return (head, row) if self.has_head else (row,)
        clean, noisy = Stream("clean_ce", 0, _CLEAN), Stream("noisy_ce", 1, _NOISY)
        return (clean,) if isinstance(self.config, ArObjective) else (clean, noisy)

    @property
    def predictors(self) -> tuple[str, ...]:
        """Metric prefixes of a mask row's predictions; that of the main one is empty."""
        return ("row_", "") if self.has_head else ("",)

    @property
    def needs_anchor(self) -> bool:
        """Whether some rows are anchored to the starting model."""
        if not isinstance(self.config, MarsObjective) or self.own_from is None:
            return False
        return bool(self.config.anchor_weight)

    @property
    def acceptance_weight(self) -> float:
        """How strongly a noisy row's effect on the expected T/F is its weight, from 0 to 1."""
        return self.config.acceptance_weight if isinstance(self.config, MarsObjective) else 0.0

    @property
    def depths(self) -> int:
        """Number of tokens ahead that the stage trains for; 0 for the AR objective."""
        return 0 if isinstance(self.config, ArObjective) else self.config.max_block_size
