"""From a batch of tokens to the layout that a stage's objective trains on."""

from dataclasses import dataclass

from mars_ray.config.train import ArObjective, MarsObjective, StageConfig
from mars_ray.core.batch import TokenBatch
from mars_ray.core.layout import (
    Layout,
    clean_layout,
    compact_layout,
    paper_layout,
    with_own_answers,
)
from mars_ray.core.schedule import ar_weight, block_starts, depth_weights

_LAYOUTS = {"compact": compact_layout, "paper": paper_layout}


@dataclass(frozen=True, slots=True)
class StageObjective:
    """An objective bound to a seed and to the model's mask token.

    `progress` is the share of the stage that is done, in [0, 1).
    """

    config: ArObjective | MarsObjective
    seed: int
    mask_token_id: int | None  # None: of a plain model, whose masks are an adapter's
    own_from: int | None = None  # the first conversation whose answer is the model's own

    @classmethod
    def of(
        cls, stage: StageConfig, seed: int, mask_token_id: int | None, own_from: int | None = None
    ) -> "StageObjective":
        """The objective of a stage."""
        return cls(stage.objective, seed, mask_token_id, own_from)

    def layout(self, batch: TokenBatch, progress: float) -> Layout:
        """The rows of one forward, on the batch's device."""
        if isinstance(self.config, ArObjective):
            return clean_layout(batch)
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
        if isinstance(self.config, ArObjective):
            return 1.0
        return ar_weight(self.config, progress)

    @property
    def needs_anchor(self) -> bool:
        """Whether some rows are held to the starting model."""
        if isinstance(self.config, ArObjective) or self.own_from is None:
            return False
        return bool(self.config.anchor_weight)

    @property
    def acceptance_weight(self) -> float:
        """How much noisy rows are weighted by what they add to the expected T/F."""
        return 0.0 if isinstance(self.config, ArObjective) else self.config.acceptance_weight

    @property
    def depths(self) -> int:
        """How many tokens ahead the stage trains for; 0 for the AR objective."""
        return 0 if isinstance(self.config, ArObjective) else self.config.max_block_size
