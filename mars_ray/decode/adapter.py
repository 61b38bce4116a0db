"""A draft adapter in the form that the runner uses: few products, on mask rows only.

Shape suffixes: D depths, H hidden size, I inputs, O outputs, N rows of a forward, R rows of tokens,
M mask rows, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from mars_ray.core.draft_head import DraftHead
from mars_ray.errors import ModelError
from mars_ray.model.draft_adapter import DraftAdapter, LoraProduct, side_by_side

# A decoder layer's linear layers, grouped by input, in the order of the runner's product.
_SITES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


class MaskRows(Protocol):
    """Which rows of a forward are masks: the adapter applies to no others."""

    def embedded(self, ids_N: Tensor, token_VH: Tensor, mask_DH: Tensor) -> Tensor:
        """Embeddings of tokens by id and of masks by depth, (N, H)."""
        ...

    def add(self, product: LoraProduct | None, y_NO: Tensor, x_NI: Tensor) -> None:
        """Add an adapter's part to the results of some linear layers, in place."""
        ...


@dataclass(frozen=True, slots=True)
class Last:
    """Masks are the rows from `first` on: a view, so that no other row is touched."""

    first: int

    def embedded(self, ids_N: Tensor, token_VH: Tensor, mask_DH: Tensor) -> Tensor:
        ids_R, depth_M = ids_N[: self.first], ids_N[self.first :]
        return torch.cat([embedding(ids_R, token_VH), embedding(depth_M, mask_DH)])

    def add(self, product: LoraProduct | None, y_NO: Tensor, x_NI: Tensor) -> None:
        if product:
            y_NO[self.first :].addmm_(product.inner(x_NI[self.first :]), product.up_KO)


@dataclass(frozen=True, slots=True)
class Gated:
    """A tensor says which rows are masks, because a recorded CUDA graph multiplies all its rows."""

    is_mask_N1: Tensor

    def embedded(self, ids_N: Tensor, token_VH: Tensor, mask_DH: Tensor) -> Tensor:
        mask_NH = embedding(ids_N.clamp(max=len(mask_DH) - 1), mask_DH)
        return torch.where(self.is_mask_N1, mask_NH, embedding(ids_N, token_VH))

    def add(self, product: LoraProduct | None, y_NO: Tensor, x_NI: Tensor) -> None:
        if product:
            # Between the two products, where a row is shortest. `where` and not a product with 0,
            # which would turn infinities into NaN.
            inner_NK = torch.where(self.is_mask_N1, product.inner(x_NI), 0)
            y_NO.addmm_(inner_NK, product.up_KO)


@dataclass(frozen=True, slots=True)
class LayerLora:
    """The products of a decoder layer; None where nothing was trained."""

    qkv: LoraProduct | None
    attention_out: LoraProduct | None
    gate_up: LoraProduct | None
    down: LoraProduct | None


@dataclass(frozen=True, slots=True)
class FusedAdapter:
    """An adapter on the model's device, in the model's dtype."""

    depths: int
    candidates: int
    mask_embedding_DH: Tensor
    layers: tuple[LayerLora, ...] | None  # None: no LoRA
    head: DraftHead | None


def fused(adapter: DraftAdapter, model: PreTrainedModel) -> FusedAdapter:
    """The adapter for this model. Raises ModelError if its shapes do not fit the model."""
    size = model.config.hidden_size
    if adapter.mask_embedding_DH.shape[1] != size:
        raise ModelError(
            f"the draft adapter has hidden size {adapter.mask_embedding_DH.shape[1]}, and the "
            f"model {size}: it was trained for another model"
        )
    head = adapter.head
    if head:
        weights = {name: _as_of(getattr(head, name), model) for name in DraftHead.__slots__}
        head = replace(head, **weights)
    layers = None
    if adapter.lora:
        _check(adapter, model)
        count = model.config.num_hidden_layers
        layers = tuple(_layer(adapter, model, index) for index in range(count))
    return FusedAdapter(
        adapter.card.depths,
        min(adapter.card.candidates, model.config.vocab_size),
        _as_of(adapter.mask_embedding_DH, model),
        layers,
        head,
    )


def _as_of(weight: Tensor, model: PreTrainedModel) -> Tensor:
    return weight.to(device=model.device, dtype=model.dtype)


def _check(adapter: DraftAdapter, model: PreTrainedModel) -> None:
    known = {
        _name(model, index, layer)
        for index in range(model.config.num_hidden_layers)
        for layers in _SITES.values()
        for layer in layers
    }
    for name, (down_RI, up_OR) in adapter.lora.items():
        if name not in known:
            raise ModelError(f"the draft adapter has weights for {name}, which the model has not")
        found, wanted = (up_OR.shape[0], down_RI.shape[1]), _shape(model, name)
        if found != wanted:
            raise ModelError(
                f"the draft adapter's weights for {name} have shape {found}, and the model's "
                f"{wanted}: it was trained for another model"
            )


def _name(model: PreTrainedModel, index: int, layer: str) -> str:
    return f"{model.base_model_prefix}.layers.{index}.{layer}"


def _shape(model: PreTrainedModel, name: str) -> tuple[int, int]:
    """Outputs and inputs of a layer, whose weight may be gone already (`linear.py`)."""
    linear: Any = model.get_submodule(name)
    return linear.out_features, linear.in_features


def _layer(adapter: DraftAdapter, model: PreTrainedModel, index: int) -> LayerLora:
    return LayerLora(
        **{
            site: _product(adapter, model, [_name(model, index, layer) for layer in layers])
            for site, layers in _SITES.items()
        }
    )


def _product(
    adapter: DraftAdapter, model: PreTrainedModel, names: Iterable[str]
) -> LoraProduct | None:
    """The product of layers that share an input."""
    names = list(names)
    layers = [adapter.lora.get(name) for name in names]
    outputs = [_shape(model, name)[0] for name in names]
    product = side_by_side(layers, outputs, adapter.card.scale)
    return product.as_of(model.device, model.dtype) if product else None
