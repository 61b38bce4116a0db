"""A draft adapter on vLLM's modules, whatever their quantization and however they are sharded.

vLLM has one linear layer for queries, keys and values, and one for the two inputs of an MLP. With
tensor parallelism a layer is cut by its outputs (`column`) or by its inputs (`row`); then each rank
has its part of the adapter, and of a product by inputs the inner results are summed over ranks.

Why not vLLM's own LoRA, which maps adapters to tokens: a row has one adapter there, so that masks
of a request with a LoRA of its own would lose that one; and all linear layers would pay for it.

Shape suffixes: I inputs, O outputs, R rank, M rows of masks.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mars_ray.errors import ModelError
from mars_ray.model.draft_adapter import DraftAdapter, Lora, LoraProduct, side_by_side
from mars_ray.vllm.mask_rows import MaskRows, SummedProduct, add_after, embed_after

# vLLM's layers in a decoder layer, and those of the adapter that make one of them.
_COLUMN = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_ROW = ("self_attn.o_proj", "mlp.down_proj")
# Models whose decoder layers have these names, and a causal forward over them.
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


@dataclass(frozen=True, slots=True)
class Parts:
    """What an adapter adds to this rank's layers, by their names, and its embeddings of masks."""

    deltas: dict[str, LoraProduct]
    mask_DH: Tensor


def fitted(adapter: DraftAdapter, model: Any, dtype: torch.dtype) -> Parts:
    """The adapter on vLLM's `model`, which does not change. Raises ModelError if it does not
    fit."""
    device = next(model.parameters()).device
    mask_DH = adapter.mask_embedding_DH.to(device, dtype)
    adapter.check_hidden_size(model.config.hidden_size)
    deltas: dict[str, LoraProduct] = {}
    unused = set(adapter.lora)
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}"
        for own, names in _COLUMN.items():
            loras = [adapter.lora.get(f"{prefix}.{name}") for name in names]
            module = _base(layer.get_submodule(own))
            product = _by_outputs(loras, module, adapter.card.scale, f"{prefix}.{own}")
            if product:
                deltas[f"{prefix}.{own}"] = product.as_of(device, dtype)
            unused -= {f"{prefix}.{name}" for name in names}
        for own in _ROW:
            name = f"{prefix}.{own}"
            lora = adapter.lora.get(name)
            if lora:
                module = _base(layer.get_submodule(own))
                delta = _by_inputs(lora, module, adapter.card.scale, name).as_of(device, dtype)
                if module.tp_size > 1:
                    delta = SummedProduct(delta.down_IK, delta.up_KO)
                deltas[name] = delta
            unused.discard(name)
    if unused:
        name = min(unused)
        raise ModelError(f"the draft adapter has weights for {name}, which the model has not")
    return Parts(deltas, mask_DH)


class Sites:
    """The places of a model where adapters act on masks."""

    def __init__(self, model: Any, masks: MaskRows, first: Parts | None, *, change: bool) -> None:
        """With `change` every layer is one, else those that the first adapter has weights for."""
        self._embedding = embed_after(model.model.embed_tokens, masks)
        names = [
            f"model.layers.{index}.{own}"
            for index in range(len(model.model.layers))
            for own in (*_COLUMN, *_ROW)
        ]
        self._layers = {
            name: add_after(model.get_submodule(name), masks)
            for name in names
            if change or (first and name in first.deltas)
        }
        self.put(first)

    def put(self, parts: Parts | None) -> None:
        """Let an adapter act from the next forward on, or none."""
        self._embedding.mask_DH = parts.mask_DH if parts else None
        for name, site in self._layers.items():
            site.delta = parts.deltas.get(name) if parts else None


def _base(module: Any) -> Any:
    """The linear layer itself, if vLLM has wrapped it for requests' own LoRA."""
    return module.base_layer if hasattr(module, "base_layer") else module


def _by_outputs(
    loras: list[Lora | None], module: Any, scale: float, name: str
) -> LoraProduct | None:
    """This rank's part of layers that share an input and are cut by their outputs."""
    parts = _output_parts(module)
    cut: list[Lora | None] = []
    for lora, (size, index, count) in zip(loras, parts, strict=True):
        if lora is None:
            cut.append(None)
            continue
        lora.check(name, size * count, module.input_size)
        cut.append(Lora(lora.down_RI, lora.up_OR[index * size : (index + 1) * size]))
    return side_by_side(cut, [size for size, _, _ in parts], scale)


def _output_parts(module: Any) -> list[tuple[int, int, int]]:
    """Of each layer in `module`: outputs of a part, which one is this rank's, number of parts."""
    rank, ranks = module.tp_rank, module.tp_size
    if not hasattr(module, "num_kv_head_replicas"):
        return [(size, rank, ranks) for size in module.output_partition_sizes]
    replicas = module.num_kv_head_replicas
    own, parts = rank // replicas, ranks // replicas
    return [
        (module.num_heads * module.head_size, rank, ranks),
        (module.num_kv_heads * module.head_size, own, parts),
        (module.num_kv_heads * module.v_head_size, own, parts),
    ]


def _by_inputs(lora: Lora, module: Any, scale: float, name: str) -> LoraProduct:
    """This rank's part of a layer that is cut by its inputs."""
    lora.check(name, module.output_size, module.input_size)
    size = module.input_size_per_partition
    start = module.tp_rank * size
    part = Lora(lora.down_RI[:, start : start + size], lora.up_OR)
    product = side_by_side([part], [module.output_size], scale)
    assert product is not None
    return product
