"""One forward of a draft adapter's training or evaluation, as a module that an engine can wrap.

Its parameters are the adapter's. The frozen model is not among its submodules.

Shape suffixes: B rows of a batch, R rows of a layout, L clean tokens, M mask rows of a row, N mask
rows with a target; T = B * L, X = B * M, H hidden size.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from torch.utils.checkpoint import checkpoint

from mars_ray.config.train import DraftObjective
from mars_ray.core.draft_layout import DraftRows, draft_sizes
from mars_ray.core.draft_loss import DraftChoices, DraftLoss, DraftTargets, draft_choices
from mars_ray.core.layout import NO_TARGET, Layout, visible
from mars_ray.model.draft_adapter import DraftCard
from mars_ray.train.draft_adapter import head_of, lora_groups, with_lora
from mars_ray.train.frozen import FrozenModel


class DraftStep(nn.Module):
    """An adapter beside its frozen model, with its loss."""

    def __init__(
        self,
        base: FrozenModel,
        card: DraftCard,
        weights: dict[str, Tensor],
        objective: DraftObjective,
        *,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        # In a tuple, so that it is not trained, wrapped, sharded or saved.
        self._base = (base,)
        self._card, self._objective = card, objective
        self._loss_weights = objective.row_loss_weight, objective.head_loss_weight
        self._run = partial(checkpoint, use_reentrant=False) if gradient_checkpointing else _call
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))

    @property
    def stored(self) -> nn.Module:
        """The module whose weights a checkpoint holds."""
        return self

    def forward(self, coefficient_BR: Tensor | None = None, **layout_BR: Tensor) -> Any:
        """Returns (loss, sums), or without coefficients (sums, predictions).

        Sums are `weight * loss` of the head and of mask rows, float64 (2,). Predictions are int64
        (2, B, R), by mask rows and by the head; a clean row's own prediction stands in both.
        """
        layout = Layout(**layout_BR)
        with torch.autocast(layout.depth_BR.device.type, enabled=False):
            return self._forward(layout, coefficient_BR)

    def _forward(self, layout: Layout, coefficient_BR: Tensor | None) -> Any:
        base, card = self._base[0], self._card
        length, width = draft_sizes(layout)
        rows = DraftRows.of(layout, length, width)
        teacher_TH, hidden_XH = self._hidden_states(rows)
        index_N, targets = _targets(rows, teacher_TH)
        hidden_NH = hidden_XH.index_select(0, index_N)
        head, corrected_NH = head_of(self._weights(), card, base.dtype), None
        if head is not None:
            previous_NH = embedding(rows.token_BM.flatten()[index_N], base.embedding_VH)
            corrected_NH = head.correct(
                hidden_NH.to(base.dtype), previous_NH, rows.depth_BM.flatten()[index_N]
            )
        known = hidden_NH, corrected_NH, base.head_VH, targets
        settings = self._objective.loss, card.candidates
        weight_N = layout.weight_BR[:, length:].flatten()[index_N]
        if coefficient_BR is None:
            found = draft_choices(*known, *settings)
            predicted_2BR = _predictions(rows, index_N, targets, found)
            return _sums(weight_N, found.head_N, found.row_N), predicted_2BR
        coefficient_N1 = coefficient_BR[:, length:].flatten()[index_N, None]
        coefficient_N2 = coefficient_N1 * coefficient_N1.new_tensor(self._loss_weights)
        result: Any = DraftLoss.apply(*known, coefficient_N2, *settings)
        loss, row_N, head_N = result
        return loss, _sums(weight_N, head_N, row_N)

    def _hidden_states(self, rows: DraftRows) -> tuple[Tensor, Tensor]:
        """Last hidden states of clean rows, (T, H), and of mask rows, (X, H)."""
        base, card = self._base[0], self._card
        clean = base.clean(rows.ids_BL, rows.position_BL, _causal(rows))
        groups, scale = lora_groups(self._weights(), card, base), card.scale

        def product(layer: int, group: str, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
            lora = groups.get((layer, group))
            if lora is None:
                return linear(x, weight, bias)
            return with_lora(x, weight, bias, lora, scale)

        masks_DH = self._weights()["mask_embedding_DH"].float()
        hidden_XH = base.masks(
            embedding((rows.depth_BM.flatten() - 1).clamp_min(0), masks_DH),
            base.turn(rows.position_BM.flatten()),
            rows.sees_BKL,
            rows.width,
            clean,
            product,
            self._run,
        )
        return clean.hidden_BLH.flatten(0, 1), hidden_XH

    def _weights(self) -> dict[str, Tensor]:
        return dict(self.named_parameters(recurse=False))


def _call(function: Any, *arguments: Any) -> Tensor:
    return function(*arguments)


def _causal(rows: DraftRows) -> Tensor | None:
    """Which clean row sees which, bool (B, L, L); None if no row holds two conversations."""
    document, position = rows.document_BL, rows.position_BL
    index_L = torch.arange(position.shape[1], device=position.device)
    # Padding lies behind the conversation, where no row sees it.
    if ((position == index_L) | (document < 0)).all():
        return None
    block = torch.full_like(position, -1)
    queries = [x[:, :, None] for x in (document, position, block)]
    return visible(*queries, *(x[:, None] for x in (document, position, block)))


def _targets(rows: DraftRows, teacher_TH: Tensor) -> tuple[Tensor, DraftTargets]:
    """Indices of mask rows with a target, in the order of their twins, and these targets."""
    length = rows.ids_BL.shape[1]
    first_B1 = torch.arange(len(rows.ids_BL), device=teacher_TH.device)[:, None] * length
    index_N = (rows.target_BM != NO_TARGET).flatten().nonzero().squeeze(1)
    twin_N, order_N = (rows.twin_BM + first_B1).flatten()[index_N].sort(stable=True)
    index_N = index_N[order_N]
    return index_N, DraftTargets(teacher_TH, twin_N, rows.target_BM.flatten()[index_N])


def _predictions(
    rows: DraftRows, index_N: Tensor, targets: DraftTargets, found: DraftChoices
) -> Tensor:
    """Predictions, int64 (2, B, R): -1 on rows without a target."""
    shape_BL, shape_BM = rows.ids_BL.shape, rows.token_BM.shape
    clean_T = index_N.new_full((shape_BL.numel(),), -1)
    clean_T[targets.twin_N] = found.twin_choice_N
    mask_2X = index_N.new_full((2, shape_BM.numel()), -1)
    mask_2X[:, index_N] = torch.stack([found.row_choice_N, found.head_choice_N])
    clean_2BL = clean_T.view(shape_BL).expand(2, -1, -1)
    return torch.cat([clean_2BL, mask_2X.unflatten(1, shape_BM)], dim=2)


def _sums(weight_N: Tensor, head_N: Tensor, row_N: Tensor) -> Tensor:
    return torch.stack([(weight_N * head_N).double().sum(), (weight_N * row_N).double().sum()])
