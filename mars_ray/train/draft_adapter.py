"""A draft adapter in training: its weights, float32, by flat names; and one forward of a training
or evaluation step, as a module that an engine can wrap.

The weights belong to that one module, whose submodules do not include the frozen model: under
ZeRO-3 a module's own weights are gathered while it is called, and a whole adapter is not much
larger than one layer of its model.

    mask_embedding_DH, head_hidden_KH, head_token_KH, head_depth_DK, head_out_HK
    layer_0_qkv_down_SI                        down-projections that share an input are one
    layer_0_q_proj_up_OR, layer_0_k_proj_up_OR, ...

Shape suffixes of weights: D depths, H hidden size of the model, K of the head, R rank, S sum of the
ranks of the layers that share an input, I inputs, O outputs (of all layers that share an input), P
those of one of them, N rows. Of a forward: B rows of a batch, R rows of a layout, L clean tokens, M
mask rows of a row, N mask rows with a target; T = B * L, X = B * M.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from operator import call
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from torch.utils.checkpoint import checkpoint

from mars_ray.config.train import DraftAdapterConfig, DraftObjective
from mars_ray.core.draft_head import DraftHead
from mars_ray.core.draft_layout import DraftRows
from mars_ray.core.draft_loss import DraftChoices, DraftLoss, DraftTargets, draft_choices
from mars_ray.core.layout import NO_TARGET, Layout, visible
from mars_ray.errors import ModelError
from mars_ray.model.directory import fingerprint, read_card
from mars_ray.model.draft_adapter import DraftAdapter, DraftCard, Lora
from mars_ray.model.load import load_model
from mars_ray.train.frozen import GROUPS, FrozenModel

EMBEDDING = "mask_embedding_DH"
_HEAD = tuple(field.name for field in fields(DraftHead))


class _LoraProduct(torch.autograd.Function):
    """`W x + b + scale * up(down(x))`, in the dtype of x; the adapter's weights may be float32.
    `places` are the layers' rows in the joined weight W.

    Its backward is written by hand: no gradient of the frozen weight, sums in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        places: tuple[slice, ...],
        scale: float,
        down_SI: Tensor,
        *ups_PR: Tensor,
    ) -> Tensor:
        down = down_SI.to(x_NI.dtype)
        ups = [up.to(x_NI.dtype) for up in ups_PR]
        inner_NS = linear(x_NI, down)
        out_NO = linear(x_NI, weight_OI, bias_O)
        for place, up, inner in zip(places, ups, _each(inner_NS, ups), strict=True):
            out_NO[:, place].addmm_(inner, up.t(), alpha=scale)
        ctx.save_for_backward(x_NI, weight_OI, inner_NS, down, *ups)
        ctx.places, ctx.scale, ctx.types = places, scale, [w.dtype for w in (down_SI, *ups_PR)]
        return out_NO

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_NI, weight_OI, inner_NS, down, *ups = ctx.saved_tensors
        grad_inner_NS = torch.empty_like(inner_NS)
        grad_ups = []
        for place, up, inner, grad_inner in zip(
            ctx.places, ups, _each(inner_NS, ups), _each(grad_inner_NS, ups), strict=True
        ):
            grad_NP = grad_NO[:, place]
            grad_inner.copy_(grad_NP @ up).mul_(ctx.scale)
            grad_ups.append((grad_NP.t() @ inner).mul_(ctx.scale))
        grad_NI = (grad_NO @ weight_OI).addmm_(grad_inner_NS, down)
        grads = [grad_inner_NS.t() @ x_NI, *grad_ups]
        trained = (grad.to(dtype) for grad, dtype in zip(grads, ctx.types, strict=True))
        return grad_NI, None, None, None, None, *trained


def _each(inner_NS: Tensor, ups: list[Tensor]) -> tuple[Tensor, ...]:
    """The columns of each layer, as many as its rank."""
    return inner_NS.split([up.shape[1] for up in ups], dim=1)


def draft_card(
    config: DraftAdapterConfig, depths: int, hidden: int, base: str, base_fingerprint: str
) -> DraftCard:
    """The card of a new adapter, with the configuration's defaults filled in."""
    alpha = 2.0 * config.rank if config.alpha is None else config.alpha
    return DraftCard(
        depths=depths,
        base=base,
        base_fingerprint=base_fingerprint,
        rank=config.rank,
        alpha=alpha if config.rank else 0.0,
        targets=config.targets if config.rank else (),
        head_size=2 * hidden if config.head_size is None else config.head_size,
        candidates=config.candidates,
    )


def fresh_weights(
    card: DraftCard, base: FrozenModel, seed: int, mask_token_id: int | None = None
) -> dict[str, Tensor]:
    """Weights of an adapter that adds nothing yet: up-projections and head output are zero.

    Mask embeddings start as that of the model's own mask token, if it was trained with one, else as
    the mean of the vocabulary's.
    """
    random = torch.Generator().manual_seed(seed)

    def uniform(outputs: int, inputs: int) -> Tensor:
        """Random initial weights, as in torch's linear layers and peft's down-projections."""
        return (torch.rand(outputs, inputs, generator=random) * 2 - 1) / math.sqrt(inputs)

    if mask_token_id is None:
        start_H = base.embedding_VH.float().mean(dim=0).cpu()
    else:
        start_H = base.embedding_VH[mask_token_id].float().cpu()
    weights = {EMBEDDING: start_H.repeat(card.depths, 1)}
    hidden, inner = len(start_H), card.head_size
    if inner:
        weights |= {
            "head_hidden_KH": uniform(inner, hidden),
            "head_token_KH": uniform(inner, hidden),
            "head_depth_DK": torch.zeros(card.depths, inner),
            "head_out_HK": torch.zeros(hidden, inner),
        }
    for layer, group, names in _groups(card, base):
        places, inputs = base.layers[0].places(group), base.layers[0].weight(group).shape[1]
        weights[f"layer_{layer}_{group}_down_SI"] = torch.cat(
            [uniform(card.rank, inputs) for _ in names]
        )
        for name in names:
            place = places[name]
            weights[f"layer_{layer}_{name}_up_OR"] = torch.zeros(
                place.stop - place.start, card.rank
            )
    return weights


def untrained_adapter(directory: Path, config: DraftAdapterConfig, depths: int) -> DraftAdapter:
    """The draft adapter that training starts from, for the model in `directory`.

    Raises ModelError.
    """
    base = FrozenModel(load_model(directory, dtype=torch.float32))
    hidden = base.embedding_VH.shape[1]
    card = draft_card(config, depths, hidden, directory.name, fingerprint(directory))
    mask_token_id = read_card(directory).trained_mask_id
    return adapter_of(fresh_weights(card, base, 0, mask_token_id), card, base)


def weights_of(adapter: DraftAdapter, card: DraftCard, base: FrozenModel) -> dict[str, Tensor]:
    """The weights of an adapter from disk, to continue training under another card.

    Depths that it lacks start as its last one. Raises ModelError if its shape differs.
    """
    old = adapter.card
    for key in ("rank", "targets", "head_size"):
        mine, wanted = getattr(old, key), getattr(card, key)
        if (set(mine) != set(wanted)) if key == "targets" else mine != wanted:
            raise ModelError(
                f"the adapter to start from has {key} {mine}, and the job's adapter {wanted}"
            )
    weights = {EMBEDDING: _with_depths(adapter.mask_embedding_DH, card.depths)}
    if adapter.head is not None:
        depth_DK = _with_depths(adapter.head.depth_DK, card.depths)
        head = replace(adapter.head, depth_DK=depth_DK)
        weights |= {f"head_{name}": getattr(head, name) for name in _HEAD}
    # The adapter's products were scaled by its own card.
    ratio = old.scale / card.scale if card.rank else 1.0
    for layer, group, names in _groups(card, base):
        parts = [adapter.lora[base.layer_name(layer, name)] for name in names]
        weights[f"layer_{layer}_{group}_down_SI"] = torch.cat([part.down_RI for part in parts])
        for name, part in zip(names, parts, strict=True):
            weights[f"layer_{layer}_{name}_up_OR"] = part.up_OR * ratio
    return {name: weight.float().cpu().contiguous() for name, weight in weights.items()}


def adapter_of(weights: Mapping[str, Tensor], card: DraftCard, base: FrozenModel) -> DraftAdapter:
    """The inverse of `weights_of`: the adapter as it is written to disk."""
    lora = {}
    for layer, group, names in _groups(card, base):
        downs = weights[f"layer_{layer}_{group}_down_SI"].split(card.rank)
        for name, down in zip(names, downs, strict=True):
            up = weights[f"layer_{layer}_{name}_up_OR"]
            lora[base.layer_name(layer, name)] = Lora(down, up)
    return DraftAdapter(card, weights[EMBEDDING], lora, head_of(weights, card))


def head_of(
    weights: Mapping[str, Tensor], card: DraftCard, dtype: torch.dtype = torch.float32
) -> DraftHead | None:
    if not card.head_size:
        return None
    return DraftHead(**{name: weights[f"head_{name}"].to(dtype) for name in _HEAD})


def _groups(card: DraftCard, base: FrozenModel) -> Iterator[tuple[int, str, list[str]]]:
    """Each layer and group, with the names of its linear layers that have a LoRA."""
    for layer in range(len(base.layers)):
        for group, members in GROUPS.items():
            names = [name for name in members if name in card.targets]
            if names:
                yield layer, group, names


def _with_depths(x: Tensor, depths: int) -> Tensor:
    more = depths - len(x)
    return torch.cat([x, x[-1:].repeat(more, 1)]) if more > 0 else x[:depths]


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
        self._run: Any = call
        if gradient_checkpointing:
            self._run = partial(checkpoint, use_reentrant=False)
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
        rows = DraftRows.of(layout)
        length = rows.ids_BL.shape[1]
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
        weights = self._weights()
        lora: dict[tuple[int, str], tuple[Any, ...]] = {}  # by layer and group
        for layer, group, names in _groups(card, base):
            places = base.layers[0].places(group)
            lora[layer, group] = (
                tuple(places[name] for name in names),
                card.scale,
                weights[f"layer_{layer}_{group}_down_SI"],
                *(weights[f"layer_{layer}_{name}_up_OR"] for name in names),
            )

        def product(layer: int, group: str, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
            if (layer, group) not in lora:
                return linear(x, weight, bias)
            return _LoraProduct.apply(x, weight, bias, *lora[layer, group])

        masks_DH = weights[EMBEDDING].float()
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
