"""From a batch of tokens to a loss: the layout that a stage's objective trains on, and one forward
of a training or evaluation step, as a module that an engine can wrap.

Only rows with a target reach the output head: the vocabulary projection and its float32 logits
would otherwise limit the batch.

Shape suffixes: B rows of a batch, R rows of a layout, N rows with a target, A anchored rows,
H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from mars_ray.config.train import ArObjective, DraftObjective, MarsObjective, StageConfig
from mars_ray.core.draft_layout import draft_layout
from mars_ray.core.layout import (
    NO_TARGET,
    Layout,
    TokenBatch,
    attention_mask,
    clean_layout,
    compact_layout,
    paper_layout,
    with_own_answers,
)
from mars_ray.core.loss import (
    WeightedCrossEntropy,
    acceptance_weights,
    cross_entropies,
    divergence,
    loss_counts,
    stream_sums,
)
from mars_ray.core.mask_schedule import ar_weight, block_starts, depth_weights, draft_blocks
from mars_ray.model.forward import hidden_states, output_head

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
        lay_out = paper_layout if self.config.layout == "paper" else compact_layout
        layout = lay_out(batch, starts_BL, depth_weights(self.config), self.mask_token_id)
        if self.own_from is None:
            return layout
        return with_own_answers(layout, self.own_from, self.config.anchor_weight or 0.0)

    def ar_weight(self, progress: float) -> float:
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
    def acceptance_weight(self) -> float:
        """How strongly a noisy row's effect on the expected T/F is its weight, from 0 to 1."""
        return self.config.acceptance_weight if isinstance(self.config, MarsObjective) else 0.0

    @property
    def depths(self) -> int:
        """Number of tokens ahead that the stage trains for; 0 for the AR objective."""
        return 0 if isinstance(self.config, ArObjective) else self.config.max_block_size


# At most this many bytes of float32 logits are kept at once; more rows are done in chunks.
_LOGITS_BYTES = 1 << 28


def chunk_rows(vocabulary: int) -> int:
    """Number of rows that go through the head at once."""
    return max(64, _LOGITS_BYTES // (4 * vocabulary))


# The names of `step_counts`, in their order.
COUNTS = (
    "clean",
    "noisy",
    "tokens",
    "filled",
    "rows",
    "targets",
    "pairs",
    "masks",
    "clean_pairs",
)


class TrainStep(nn.Module):
    """The model with its loss. Layouts are passed as keyword tensors, which engines can hook."""

    def __init__(
        self,
        model: PreTrainedModel,
        acceptance_weight: float = 0.0,
        anchor: PreTrainedModel | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        # In a tuple, so that it is not trained, wrapped, sharded or saved.
        self._anchor: tuple[PreTrainedModel, ...] = (anchor,) if anchor else ()
        self.model.set_output_embeddings(_LossHead(output_head(model)))
        self.chunk_rows = chunk_rows(model.config.vocab_size)
        self._acceptance_weight = acceptance_weight

    @property
    def stored(self) -> nn.Module:
        """The module whose weights a checkpoint holds."""
        return self.model

    def forward(
        self, coefficient_BR: Tensor | None = None, **layout_BR: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns (loss, stream sums), or without coefficients (stream sums, predictions).

        The loss is `sum(coefficient * CE)`. Stream sums are `weight * CE` summed over clean and
        over noisy rows, float64 (2,). Predictions are each target row's argmax, int64 (B, R), and
        -1 elsewhere.
        """
        layout = Layout(**layout_BR)
        wanted_BR = layout.target_BR != NO_TARGET
        hidden_BRH = hidden_states(
            self.model, layout.input_ids_BR, layout.position_BR, attention_mask(layout)
        )
        hidden_NH, target_N = hidden_BRH[wanted_BR], layout.target_BR[wanted_BR]
        head = output_head(self.model)
        if coefficient_BR is None:
            ce_N, predicted_N = head(hidden_NH, target_N, self.chunk_rows)
            predicted_BR = torch.full_like(layout.target_BR, -1)
            return stream_sums(layout, wanted_BR, ce_N), predicted_BR.masked_scatter(
                wanted_BR, predicted_N
            )
        coefficient_N = coefficient_BR[wanted_BR]
        if self._acceptance_weight:
            coefficient_N *= self._factors(hidden_NH, target_N, layout.depth_BR[wanted_BR])
        loss, ce_N = head(hidden_NH, target_N, self.chunk_rows, coefficient_N)
        sums = stream_sums(layout, wanted_BR, ce_N)
        if self._anchor and layout.is_anchored_BR.any():
            kl_A = self._divergence(layout, hidden_BRH)
            loss = loss + (coefficient_BR[layout.is_anchored_BR] * kl_A).sum()
            sums[0] += (layout.weight_BR[layout.is_anchored_BR] * kl_A.detach()).sum()
        return loss, sums

    @torch.no_grad()
    def _factors(self, hidden_NH: Tensor, target_N: Tensor, depth_N: Tensor) -> Tensor:
        """Factors of the rows' coefficients, float32 (N,): a noisy row's by its effect on T/F."""
        factor_N = torch.ones_like(target_N, dtype=torch.float32)
        noisy_N = depth_N > 0
        # Called even without noisy rows, because every rank must call the head equally often.
        ce_M, _ = output_head(self.model)(hidden_NH[noisy_N], target_N[noisy_N], self.chunk_rows)
        if len(ce_M):
            weight_M = acceptance_weights(ce_M, depth_N[noisy_N]).float()
            factor_N[noisy_N] = torch.lerp(
                torch.ones_like(weight_M), weight_M, self._acceptance_weight
            )
        return factor_N

    def _divergence(self, layout: Layout, hidden_BRH: Tensor) -> Tensor:
        """KL(starting model || model) of each anchored row, float32 (A,)."""
        anchor = self._anchor[0]
        anchored_BR = layout.is_anchored_BR
        # Clean rows see no noisy ones, so rows behind the last anchored row are left out.
        width = int(anchored_BR.any(dim=0).nonzero().max()) + 1
        part = Layout(**{name: getattr(layout, name)[:, :width] for name in Layout.__slots__})
        with torch.no_grad():
            theirs_BRH = hidden_states(
                anchor, part.input_ids_BR, part.position_BR, attention_mask(part)
            )
        rows = hidden_BRH[anchored_BR], theirs_BRH[anchored_BR[:, :width]]
        chunks = zip(*(hidden_AH.split(self.chunk_rows) for hidden_AH in rows), strict=True)
        heads = output_head(self.model), output_head(anchor)
        return torch.cat(
            [checkpoint(divergence, *heads, *pair, use_reentrant=False) for pair in chunks]
        )


class _LossHead(nn.Linear):
    """The model's own output projection, which can also compute the loss.

    It is a module, because ZeRO-3 gathers a weight only while the module that owns it is called. It
    makes chunks inside one call: a call is a collective there, and ranks have unequal row counts.
    """

    def __init__(self, head: nn.Module) -> None:
        assert isinstance(head, nn.Linear), f"the output head is a {type(head).__name__}"
        assert head.bias is None, "an output head with a bias"
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight = head.weight

    def forward(
        self,
        input: Tensor,  # noqa: A002 - nn.Linear's name
        target_N: Tensor | None = None,
        chunk_rows: int = 0,
        coefficient_N: Tensor | None = None,
    ) -> Any:
        """Logits (N, V); with targets, cross-entropies and predictions, both (N,); with
        coefficients, the loss and cross-entropies."""
        if target_N is None:
            return super().forward(input)
        if coefficient_N is None:
            return cross_entropies(super().forward, input, target_N, chunk_rows)
        return WeightedCrossEntropy.apply(input, self.weight, target_N, coefficient_N, chunk_rows)


def layout_tensors(layout: Layout, device: torch.device) -> dict[str, Tensor]:
    """A layout as the keyword arguments of `TrainStep`, on a device."""
    return {name: getattr(layout, name).to(device) for name in Layout.__slots__}


def step_counts(layouts: list[Layout]) -> Tensor:
    """Counts of a step, known before its forwards, float64 (9,); they add up over ranks.

    In order: clean target rows, summed noisy weight, tokens of the clean stream, rows without
    padding, all rows. Then: rows with a target, keys seen by rows without padding, mask rows with a
    target, keys seen by clean rows without padding.
    """
    total = torch.zeros(len(COUNTS), dtype=torch.float64)
    for layout in layouts:
        filled_BR = layout.document_BR >= 0
        clean_BR = filled_BR & ~layout.is_noisy_BR
        has_target_BR = layout.target_BR != NO_TARGET
        total[:2] += loss_counts(layout)
        total[2] += clean_BR.sum()
        total[3] += filled_BR.sum()
        total[4] += filled_BR.numel()
        total[5] += has_target_BR.sum()
        total[6] += ((layout.position_BR + 1) * filled_BR).sum()
        total[7] += (has_target_BR & layout.is_noisy_BR).sum()
        total[8] += ((layout.position_BR + 1) * clean_BR).sum()
    return total
