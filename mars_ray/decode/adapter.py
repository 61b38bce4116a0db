"""A draft adapter in the form that the runner uses: few products, on mask rows only.

Shape suffixes: D depths, H hidden size, I inputs, O outputs, N rows of a forward, R rows of tokens,
M mask rows, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Last:
    """Masks are the rows from `first` on: a view, so that no other row is touched."""

    first: int

    def embedded(self, ids_N: Tensor, token_VH: Tensor, mask_DH: Tensor) -> Tensor:
        """Embeddings of tokens by id and of masks by depth, (N, H)."""
        ids_R, depth_M = ids_N[: self.first], ids_N[self.first :]
        return torch.cat([embedding(ids_R, token_VH), embedding(depth_M, mask_DH)])

    def add(self, product: LoraProduct | None, y_NO: Tensor, x_NI: Tensor) -> None:
        """Add an adapter's part to the results of some linear layers, in place."""
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


# Which rows of a forward are masks: the adapter applies to no others.
MaskRows = Last | Gated


@dataclass(frozen=True, slots=True)
class FusedAdapter:
    """An adapter on the model's device, in the model's dtype."""

    depths: int
    candidates: int
    mask_embedding_DH: Tensor
    layers: list[dict[str, LoraProduct]]  # by site, where it has LoRA; empty if it has none
    head: DraftHead | None


def fused(adapter: DraftAdapter, model: PreTrainedModel) -> FusedAdapter:
    """The adapter for this model. Raises ModelError if its shapes do not fit the model."""
    adapter.check_hidden_size(model.config.hidden_size)
    layers: list[dict[str, LoraProduct]] = []
    unused = set(adapter.lora)
    for index in range(model.config.num_hidden_layers if adapter.lora else 0):
        layers.append({})
        for site, own in _SITES.items():
            names = [f"{model.base_model_prefix}.layers.{index}.{name}" for name in own]
            # Their weights may be gone already (`cpu/backend.py`), but not their sizes.
            linears: list[Any] = [model.get_submodule(name) for name in names]
            loras = [adapter.lora.get(name) for name in names]
            for name, linear, lora in zip(names, linears, loras, strict=True):
                if lora:
                    lora.check(name, linear.out_features, linear.in_features)
            outputs = [linear.out_features for linear in linears]
            if product := side_by_side(loras, outputs, adapter.card.scale):
                layers[-1][site] = product.as_of(model.device, model.dtype)
            unused.difference_update(names)
    if unused:
        raise ModelError(
            f"the draft adapter has weights for {min(unused)}, which the model has not"
        )
    return FusedAdapter(
        adapter.card.depths,
        min(adapter.card.candidates, model.config.vocab_size),
        adapter.mask_embedding_DH.to(model.device, model.dtype),
        layers,
        adapter.head.as_of(model.device, model.dtype) if adapter.head else None,
    )
