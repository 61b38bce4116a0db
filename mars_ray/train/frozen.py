"""A frozen model for a draft adapter's training: clean rows are computed once, then mask rows.

Clean rows produce keys, values and last hidden states, without a gradient. Mask rows attend to
those and to their own block. Only mask rows have a backward pass, and it computes no gradient of
the model's weights. Products are in the model's dtype, the residual stream and softmax in float32:
on a CPU with bfloat16 products this is the fastest way known (docs/log.md).

Attention of blocks uses plain matrix products. On a CPU, scaled_dot_product_attention is five times
slower here, and its keys would include all mask rows. (Forward and backward take 9.0 ms, not 1.7,
for 60 blocks of 4 over 180 clean rows, one thread, bfloat16.)

Shape suffixes: B rows of a batch, L clean tokens, K blocks, W slots of a block, N rows of any pass,
H hidden size, T heads of queries, keys and values together, Q query heads, E key heads, G query
heads of each, D head size, I inputs, O outputs, X = K * W * G rows of a key head, J = L + W keys of
a row.
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
from mars_ray.model.forward import check_layers, head_norm_weight, joined, output_head

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
        check_layers(model)
        if getattr(model.config, "use_sliding_window", False):
            raise ModelError("draft adapters cannot be trained on a model with a sliding window")
        self.dtype = model.dtype
        self.embedding_VH: Tensor = base.embed_tokens.weight.detach()
        head = output_head(model)
        assert isinstance(head, nn.Linear), f"the output head is a {type(head).__name__}"
        assert head.bias is None, "an output head with a bias"
        self.head_VH = head.weight.detach()
        self.layers = [_Layer(layer) for layer in base.layers]
        self._norm = _Norm(base.norm)
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


class _Norm:
    def __init__(self, module: Any) -> None:
        self.weight_H = module.weight.detach().float()
        self.epsilon = module.variance_epsilon

    def __call__(self, x_NH: Tensor, dtype: torch.dtype) -> Tensor:
        normed_NH: Any = _NormFunction.apply(x_NH, self.weight_H, self.epsilon)
        return normed_NH.to(dtype)


class _Layer:
    """A decoder layer; matrices with the same input are joined into one."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.head_size: int = attention.head_dim
        self.query_heads = attention.q_proj.out_features // self.head_size
        self.key_heads = attention.k_proj.out_features // self.head_size
        self.scale: float = attention.scaling
        self.input_norm = _Norm(layer.input_layernorm)
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [module.bias for module in qkv if module.bias is not None]
        self.qkv_OI = joined([module.weight for module in qkv])
        self.qkv_bias_O = joined(biases) if biases else None
        # Qwen3's norm, applied to every query and key head separately.
        weight_TD = head_norm_weight(attention, self.query_heads, self.key_heads)
        self.head_norm_TD = None if weight_TD is None else weight_TD.float()
        self.head_epsilon = 0.0 if weight_TD is None else attention.q_norm.variance_epsilon
        out_bias = attention.o_proj.bias
        self.out_OI: Tensor = attention.o_proj.weight.detach()
        self.out_bias_O: Tensor | None = None if out_bias is None else out_bias.detach()
        self.mlp_norm = _Norm(layer.post_attention_layernorm)
        self.gate_up_OI = joined([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.down_OI: Tensor = mlp.down_proj.weight.detach()

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
        if self.head_norm_TD is not None:
            size = qk_NTD.shape[-1:]
            normed_NTD = torch.rms_norm(qk_NTD.float(), size, None, self.head_epsilon)
            qk_NTD = (normed_NTD * self.head_norm_TD).to(qk_NTD.dtype)
        swapped_NTD = qk_NTD.roll(self.head_size // 2, dims=-1)
        return torch.cat([qk_NTD * cos_N1D + swapped_NTD * sin_N1D, v_NED], dim=1)


class BlockAttention(torch.autograd.Function):
    """A slot sees the clean rows that its block sees, and the block's slots up to itself.

    Keys and values of clean rows get no gradient. Softmax is in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_BKWQD: Tensor,
        key_BKWED: Tensor,
        value_BKWED: Tensor,
        clean_key_BELD: Tensor,
        clean_value_BELD: Tensor,
        sees_BKL: Tensor,
        scale: float,
    ) -> Tensor:
        """Output of the heads at every slot, (B, K, W, Q * D)."""
        shape = query_BKWQD.shape
        heads, length = clean_key_BELD.shape[1:3]
        query = _by_key_head(query_BKWQD, heads)
        key, value = _by_key_head(key_BKWED, heads), _by_key_head(value_BKWED, heads)
        clean_key, clean_value = clean_key_BELD.flatten(0, 1), clean_value_BELD.flatten(0, 1)
        weights = _weights(query, key, clean_key, sees_BKL, shape, scale)
        to_clean, to_own = weights.tensor_split((length,), dim=-1)
        out = torch.bmm(to_clean, clean_value)
        out += torch.bmm(_blocks(to_own, shape), _blocks(value, shape)).reshape_as(out)
        ctx.save_for_backward(query, key, value, clean_key, clean_value, weights)
        ctx.shape, ctx.heads, ctx.scale = shape, heads, scale
        return _by_slot(out, shape, heads).flatten(3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, clean_key, clean_value, weights = ctx.saved_tensors
        shape, heads = ctx.shape, ctx.heads
        length = clean_key.shape[1]
        grad = _by_key_head(grad.view(shape), heads)
        grad_blocks, own = _blocks(grad, shape), _blocks(weights[..., length:], shape)
        grad_value = torch.bmm(own.transpose(1, 2), grad_blocks)
        slope = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
        slope[..., :length] = torch.bmm(grad, clean_value.transpose(1, 2))
        to_own = torch.bmm(grad_blocks, _blocks(value, shape).transpose(1, 2))
        slope[..., length:] = to_own.reshape_as(weights[..., length:])
        weights = weights.float()
        mean = torch.linalg.vecdot(slope, weights).unsqueeze_(-1)
        slope = slope.sub_(mean).mul_(weights.mul_(ctx.scale)).to(query.dtype)
        to_clean, to_own = slope.tensor_split((length,), dim=-1)
        grad_query = torch.bmm(to_clean, clean_key)
        own = _blocks(to_own, shape)
        grad_query += torch.bmm(own, _blocks(key, shape)).reshape_as(grad_query)
        grad_key = torch.bmm(own.transpose(1, 2), _blocks(query, shape))
        one_each = (*shape[:3], heads, shape[4])
        return (
            _by_slot(grad_query, shape, heads),
            _by_slot(grad_key.reshape_as(key), one_each, heads),
            _by_slot(grad_value.reshape_as(value), one_each, heads),
            *(None,) * 4,
        )


def _weights(
    query: Tensor, key: Tensor, clean_key: Tensor, sees_BKL: Tensor, shape: Any, scale: float
) -> Tensor:
    """Attention weights, (B * E, X, L + W), in the queries' dtype."""
    rows, blocks, width = shape[:3]
    length = clean_key.shape[1]
    scores = torch.empty(
        (*query.shape[:2], length + width), dtype=torch.float32, device=query.device
    )
    scores[..., :length] = torch.bmm(query, clean_key.transpose(1, 2))
    own = torch.bmm(_blocks(query, shape), _blocks(key, shape).transpose(1, 2))
    scores[..., length:] = own.reshape_as(scores[..., length:])
    by_block = scores.view(
        rows, -1, blocks, width, query.shape[1] // (blocks * width), scores.shape[2]
    )
    by_block[..., :length].masked_fill_(~sees_BKL[:, None, :, None, None], -torch.inf)
    later_WW = torch.ones(width, width, dtype=torch.bool, device=query.device).triu(1)
    by_block[..., length:].masked_fill_(later_WW[:, None], -torch.inf)
    return scores.mul_(scale).softmax(dim=-1).to(query.dtype)


def _by_key_head(x: Tensor, heads: int) -> Tensor:
    """(B, K, W, heads, D) as (B * E, K * W * heads of each, D)."""
    grouped = x.unflatten(3, (heads, -1)).permute(0, 3, 1, 2, 4, 5)
    return grouped.reshape(x.shape[0] * heads, -1, x.shape[4])


def _by_slot(x: Tensor, shape: Any, heads: int) -> Tensor:
    """The inverse of `_by_key_head`."""
    rows, blocks, width, _, size = shape
    grouped = x.view(rows, heads, blocks, width, -1, size)
    return grouped.permute(0, 2, 3, 1, 4, 5).reshape(shape)


def _blocks(x: Tensor, shape: Any) -> Tensor:
    """(B * E, K * rows of a block, ...) as a batch of blocks."""
    return x.reshape(x.shape[0] * shape[1], -1, x.shape[2])
