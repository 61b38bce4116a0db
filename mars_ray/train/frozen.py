"""A frozen model for a draft adapter's training: clean rows are computed once, then mask rows.

Clean rows produce keys, values and last hidden states, without a gradient. Mask rows attend to
those and to their own block. Only mask rows have a backward pass, and it computes no gradient of
the model's weights. Products are in the model's dtype, the residual stream and softmax in float32:
on a CPU with bfloat16 products this is the fastest way known (docs/log.md).

Shape suffixes: B rows of a batch, L clean tokens, K blocks, W slots of a block, N rows of any pass,
H hidden size, T heads of queries, keys and values together, Q query heads, E key heads, G query
heads of each, D head size, I inputs, O outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from mars_ray.errors import ModelError
from mars_ray.model.forward import output_head
from mars_ray.train.block_attention import BlockAttention

# Rotary embeddings whose angles depend only on the position.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# A layer's linear layers in groups that share an input, by their names in the model.
GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
_MODULES = {"qkv": "self_attn", "out": "self_attn", "gate_up": "mlp", "down": "mlp"}

# The product of a pass: (layer, group, input, weight, bias) to output.
Product = Callable[[int, str, Tensor, Tensor, Tensor | None], Tensor]
Turn = tuple[Tensor, Tensor]  # cosines and sines, (N, 1, D)


@dataclass(frozen=True, slots=True)
class CleanPass:
    """Results of the clean rows that mask rows need."""

    keys: list[Tensor]  # of each layer, (B, E, L, D)
    values: list[Tensor]
    hidden_BLH: Tensor  # after the last norm, in the model's dtype


class FrozenModel:
    """A Qwen2, Qwen3, Llama or Mistral model, whose matrices it takes over.

    It is no module, so nothing of it is trained, wrapped, split among ranks or saved.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ModelError if the model is not supported."""
        base: Any = model.base_model
        _check(model, base)
        self.dtype = model.dtype
        self.embedding_VH: Tensor = base.embed_tokens.weight.detach()
        head = output_head(model)
        assert isinstance(head, nn.Linear), f"the output head is a {type(head).__name__}"
        assert head.bias is None, "an output head with a bias"
        self.head_VH = head.weight.detach()
        self.layers = [_Layer.of(layer) for layer in base.layers]
        self._norm = _Norm.of(base.norm)
        self._rotary = base.rotary_emb
        self._prefix = f"{model.base_model_prefix}.layers"

    @torch.no_grad()
    def clean(self, ids_BL: Tensor, position_BL: Tensor, sees_BLL: Tensor | None) -> CleanPass:
        """Keys, values and last hidden states of clean rows.

        `sees_BLL` says which row sees which; None: each row sees those before it and itself.
        """
        shape = ids_BL.shape
        turn = self.turn(position_BL.flatten())
        x_NH = embedding(ids_BL.flatten(), self.embedding_VH).float()
        keys, values = [], []

        def attend(layer: "_Layer", qkv_NTD: Tensor) -> Tensor:
            query, key, value = (
                part.unflatten(0, shape).transpose(1, 2) for part in layer.heads(qkv_NTD)
            )
            keys.append(key.contiguous())
            values.append(value.contiguous())
            out = scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if sees_BLL is None else sees_BLL[:, None],
                is_causal=sees_BLL is None,
                scale=layer.scale,
                enable_gqa=layer.key_heads != layer.query_heads,
            )
            return out.transpose(1, 2).reshape(len(x_NH), -1)

        for index, layer in enumerate(self.layers):
            x_NH = layer.forward(index, x_NH, turn, attend, _plain)
        return CleanPass(keys, values, self._norm(x_NH, self.dtype).unflatten(0, shape))

    def masks(
        self,
        x_NH: Tensor,
        turn: Turn,
        sees_BKL: Tensor,
        width: int,
        clean: CleanPass,
        product: Product,
        run: Callable[..., Tensor],
    ) -> Tensor:
        """Last hidden states of mask rows, float32 (N, H); N = B * K * W, block by block.

        `run(function, *arguments)` calls a layer, directly or with gradient checkpointing.
        """
        rows, blocks, _ = sees_BKL.shape
        for index, layer in enumerate(self.layers):

            def attend(layer: "_Layer", qkv_NTD: Tensor, index: int = index) -> Tensor:
                parts = (part.unflatten(0, (rows, blocks, width)) for part in layer.heads(qkv_NTD))
                return BlockAttention.apply(
                    *parts, clean.keys[index], clean.values[index], sees_BKL, layer.scale
                ).flatten(0, 2)

            x_NH = run(layer.forward, index, x_NH, turn, attend, product)
        return self._norm(x_NH, torch.float32)

    def places(self, group: str) -> dict[str, slice]:
        """Each linear layer's rows of its group's weight."""
        return self.layers[0].places(group)

    def inputs(self, group: str) -> int:
        """Number of inputs of the linear layers of a group."""
        return self.layers[0].weight(group).shape[1]

    def layer_name(self, layer: int, name: str) -> str:
        """A linear layer's name in the model."""
        group = next(group for group, names in GROUPS.items() if name in names)
        return f"{self._prefix}.{layer}.{_MODULES[group]}.{name}"

    def turn(self, position_N: Tensor) -> Turn:
        """Cosines and sines of the rotary embedding; the sines contain the sign of each half."""
        cos_1ND, sin_1ND = self._rotary(self.embedding_VH[:1].float(), position_N[None])
        sin_ND = sin_1ND[0].clone()
        sin_ND[:, : sin_ND.shape[1] // 2].neg_()
        return cos_1ND[0][:, None].to(self.dtype), sin_ND[:, None].to(self.dtype)


def _check(model: PreTrainedModel, base: Any) -> None:
    rope = base.rotary_emb.rope_type
    if rope not in _ROPE_TYPES:
        raise ModelError(
            f"draft adapters cannot be trained on a model with rope_type {rope!r}; supported are "
            f"{', '.join(_ROPE_TYPES)}"
        )
    if getattr(model.config, "use_sliding_window", False):
        raise ModelError("draft adapters cannot be trained on a model with a sliding window")
    if model.config.hidden_act != "silu":
        raise ModelError(f"activation {model.config.hidden_act!r} is not supported: only silu")


def _plain(
    layer: int, group: str, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None
) -> Tensor:
    return linear(x_NI, weight_OI, bias_O)


class _NormFunction(torch.autograd.Function):
    """Division by the root mean square, times a fixed weight, in half of autograd's passes."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        scale_N1 = torch.linalg.vector_norm(x_NH, dim=-1, keepdim=True).square_()
        scale_N1 = scale_N1.div_(x_NH.shape[-1]).add_(epsilon).rsqrt_()
        normed_NH = x_NH * scale_N1
        ctx.save_for_backward(normed_NH, scale_N1, weight_H)
        return normed_NH * weight_H

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        normed_NH, scale_N1, weight_H = ctx.saved_tensors
        grad_NH = grad_NH * weight_H
        mean_N1 = torch.linalg.vecdot(grad_NH, normed_NH)[:, None].div_(normed_NH.shape[-1])
        return grad_NH.addcmul_(normed_NH, mean_N1, value=-1).mul_(scale_N1), None, None


@dataclass(frozen=True, slots=True)
class _Norm:
    weight_H: Tensor  # float32
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> "_Norm":
        return cls(module.weight.detach().float(), module.variance_epsilon)

    def __call__(self, x_NH: Tensor, dtype: torch.dtype) -> Tensor:
        normed_NH: Any = _NormFunction.apply(x_NH, self.weight_H, self.epsilon)
        return normed_NH.to(dtype)


@dataclass(frozen=True, slots=True)
class _HeadNorm:
    """Qwen3's norm, applied to every query and key head separately."""

    weight_TD: Tensor
    epsilon: float

    @classmethod
    def of(cls, attention: Any, query_heads: int, key_heads: int) -> "_HeadNorm | None":
        if not hasattr(attention, "q_norm"):
            return None
        query, key = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        weight = torch.cat([query.expand(query_heads, -1), key.expand(key_heads, -1)])
        return cls(weight.float(), attention.q_norm.variance_epsilon)

    def __call__(self, x_NTD: Tensor) -> Tensor:
        size = x_NTD.shape[-1:]
        return (torch.rms_norm(x_NTD.float(), size, None, self.epsilon) * self.weight_TD).to(
            x_NTD.dtype
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer; matrices with the same input are joined into one."""

    input_norm: _Norm
    qkv_OI: Tensor
    qkv_bias_O: Tensor | None
    head_norm: _HeadNorm | None
    query_heads: int
    key_heads: int
    head_size: int
    scale: float
    out_OI: Tensor
    out_bias_O: Tensor | None
    mlp_norm: _Norm
    gate_up_OI: Tensor
    down_OI: Tensor

    @classmethod
    def of(cls, layer: Any) -> "_Layer":
        attention, mlp = layer.self_attn, layer.mlp
        size = attention.head_dim
        query_heads = attention.q_proj.out_features // size
        key_heads = attention.k_proj.out_features // size
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [module.bias for module in qkv if module.bias is not None]
        out_bias = attention.o_proj.bias
        return cls(
            _Norm.of(layer.input_layernorm),
            _joined([module.weight for module in qkv]),
            _joined(biases) if biases else None,
            _HeadNorm.of(attention, query_heads, key_heads),
            query_heads,
            key_heads,
            size,
            attention.scaling,
            attention.o_proj.weight.detach(),
            None if out_bias is None else out_bias.detach(),
            _Norm.of(layer.post_attention_layernorm),
            _joined([mlp.gate_proj.weight, mlp.up_proj.weight]),
            mlp.down_proj.weight.detach(),
        )

    def forward(
        self,
        index: int,
        x_NH: Tensor,
        turn: Turn,
        attend: Callable[["_Layer", Tensor], Tensor],
        product: Product,
    ) -> Tensor:
        dtype = self.qkv_OI.dtype
        input_NH = self.input_norm(x_NH, dtype)
        qkv_NZ = product(index, "qkv", input_NH, self.qkv_OI, self.qkv_bias_O)
        qkv_NTD = self._turned(qkv_NZ.unflatten(1, (-1, self.head_size)), turn)
        attended_NZ = attend(self, qkv_NTD)
        x_NH = x_NH + product(index, "out", attended_NZ, self.out_OI, self.out_bias_O)
        gate_NI, up_NI = product(
            index, "gate_up", self.mlp_norm(x_NH, dtype), self.gate_up_OI, None
        ).chunk(2, dim=-1)
        return x_NH + product(index, "down", silu(gate_NI) * up_NI, self.down_OI, None)

    def weight(self, group: str) -> Tensor:
        """The joined weight of a group."""
        weights = (self.qkv_OI, self.out_OI, self.gate_up_OI, self.down_OI)
        return dict(zip(GROUPS, weights, strict=True))[group]

    def places(self, group: str) -> dict[str, slice]:
        """Each linear layer's rows of its group's weight."""
        size, names = len(self.weight(group)), GROUPS[group]
        parts = [size // len(names)] * len(names)
        if group == "qkv":
            heads = self.query_heads, self.key_heads, self.key_heads
            parts = [count * self.head_size for count in heads]
        ends = list(accumulate(parts))
        return {
            name: slice(end - part, end) for name, end, part in zip(names, ends, parts, strict=True)
        }

    def heads(self, qkv_NTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (N, Q, D), keys and values (N, E, D)."""
        query, key, value = qkv_NTD.split([self.query_heads, self.key_heads, self.key_heads], dim=1)
        return query, key, value

    def _turned(self, qkv_NTD: Tensor, turn: Turn) -> Tensor:
        """Queries and keys, rotated and, if the model does so, normed; values unchanged."""
        cos_N1D, sin_N1D = turn
        qk_NTD, v_NED = qkv_NTD.split([self.query_heads + self.key_heads, self.key_heads], dim=1)
        if self.head_norm:
            qk_NTD = self.head_norm(qk_NTD)
        swapped_NTD = qk_NTD.roll(self.head_size // 2, dims=-1)
        return torch.cat([qk_NTD * cos_N1D + swapped_NTD * sin_N1D, v_NED], dim=1)


def _joined(parts: list[Tensor]) -> Tensor:
    """One tensor of all rows; the parts become its views, so that nothing is held twice."""
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole
