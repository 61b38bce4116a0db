"""The model's forward for the rows of a step, over the checkpoint's own weights.

A decoding step has few rows, so calling a Hugging Face model costs more than its arithmetic. Here a
layer is a dozen operations. What is computed is what transformers computes, and tests hold it to
that for each architecture (`tests/decode/test_runner.py`).

Shape suffixes: N rows of a forward, P rows that are read, H hidden size (key-value heads where D
follows), T heads of queries, keys and values together, D head size, V vocabulary.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu
from transformers import PreTrainedModel

from mars_ray.errors import ModelError
from mars_ray.model.forward import output_head

# Rotary embeddings whose angles depend on nothing but the position.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


# Rotary position embedding of a forward's rows: cosines and sines, (N, 1, D) each, in one shape for
# all heads. The sign that turning a pair needs is in the sines.
Turn = tuple[Tensor, Tensor]


class Attention(Protocol):
    """Of one forward's rows, over what the cache holds and over each other."""

    def attend(self, layer: int, qkv_NTD: Tensor, turn: Turn, scale: float) -> Tensor:
        """Turn queries and keys, store the rows' keys and values, attend: (N, query heads * D)."""
        ...


class Runner:
    """A Qwen2, Qwen3 or Llama model. Its parameters become views of larger ones: it stays usable,
    and nothing is held twice."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, positions: int) -> None:
        """For sequences of at most so many positions. Raises ModelError for what is unsupported."""
        base: Any = model.base_model
        rope = base.rotary_emb.rope_type
        if rope not in _ROPE_TYPES:
            raise ModelError(
                f"rope_type {rope!r} is not supported by the decoding engine; supported are "
                f"{', '.join(_ROPE_TYPES)}"
            )
        if getattr(model.config, "use_sliding_window", False):
            raise ModelError("sliding-window attention is not supported by the decoding engine")
        if model.config.hidden_act != "silu":
            raise ModelError(f"activation {model.config.hidden_act!r} is not supported: only silu")
        self.device, self.dtype = model.device, model.dtype
        # Spent in the model so far; on a GPU, in launching it and in waiting for what it says.
        self.seconds = 0.0
        self._embedding: Tensor = base.embed_tokens.weight
        self._layers = [_Layer.of(layer) for layer in base.layers]
        self._norm = _Norm.of(base.norm)
        self._head = _Linear.of([cast(nn.Linear, output_head(model))])
        index_1N = torch.arange(positions, device=model.device)[None]
        cos_1ND, sin_1ND = base.rotary_emb(self._embedding[:1], index_1N)
        half = cos_1ND.shape[-1] // 2
        self._cos_sin = torch.stack([cos_1ND[0], sin_1ND[0]], dim=1)
        self._cos_sin[:, 1, :half].neg_()

    def hidden_states(self, ids_N: Tensor, position_N: Tensor, attention: Attention) -> Tensor:
        """Last hidden states, (N, H); keys and values go into the cache."""
        started = time.perf_counter()
        x_NH = embedding(ids_N, self._embedding)
        cos_N1D, sin_N1D = self._cos_sin.index_select(0, position_N).split(1, dim=1)
        turn = cos_N1D, sin_N1D
        for index, layer in enumerate(self._layers):
            x_NH = layer.forward(x_NH, turn, index, attention)
        x_NH = self._norm(x_NH)
        self.seconds += time.perf_counter() - started
        return x_NH

    def logits(self, hidden_PH: Tensor) -> Tensor:
        """Float32, (P, V)."""
        started = time.perf_counter()
        logits_PV = self._head(hidden_PH).float()
        self.seconds += time.perf_counter() - started
        return logits_PV


@dataclass(frozen=True, slots=True)
class _Linear:
    """Linear layers with the same input as one, transposed as matrix products want it."""

    weight_IO: Tensor
    bias_O: Tensor | None

    @classmethod
    def of(cls, modules: list[nn.Linear]) -> "_Linear":
        weight = _joined([module.weight for module in modules])
        biases = [module.bias for module in modules if module.bias is not None]
        return cls(weight.t(), _joined(biases) if biases else None)

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self.bias_O is None:
            return torch.mm(x_NI, self.weight_IO)
        return torch.addmm(self.bias_O, x_NI, self.weight_IO)

    def add_to(self, residual_NO: Tensor, x_NI: Tensor) -> Tensor:
        """The product and the residual connection in one operation."""
        sum_NO = torch.addmm(residual_NO, x_NI, self.weight_IO)
        return sum_NO if self.bias_O is None else sum_NO.add_(self.bias_O)


@dataclass(frozen=True, slots=True)
class _Norm:
    weight_H: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> "_Norm":
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, x_NH: Tensor) -> Tensor:
        return torch.rms_norm(x_NH, self.weight_H.shape, self.weight_H, self.epsilon)


@dataclass(frozen=True, slots=True)
class _HeadNorm:
    """Qwen3's, of every query and key head by itself."""

    weight_TD: Tensor
    epsilon: float

    @classmethod
    def of(cls, attention: Any, query_heads: int, key_heads: int) -> "_HeadNorm | None":
        if not hasattr(attention, "q_norm"):
            return None
        query, key = attention.q_norm.weight, attention.k_norm.weight
        weight = torch.cat([query.expand(query_heads, -1), key.expand(key_heads, -1)])
        return cls(weight, attention.q_norm.variance_epsilon)

    def __call__(self, x_NTD: Tensor) -> Tensor:
        return torch.rms_norm(x_NTD, x_NTD.shape[-1:], None, self.epsilon) * self.weight_TD


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer."""

    input_norm: _Norm
    qkv: _Linear
    head_norm: _HeadNorm | None
    query_heads: int
    key_heads: int
    head_size: int
    scale: float
    attention_out: _Linear
    mlp_norm: _Norm
    gate_up: _Linear
    down: _Linear

    @classmethod
    def of(cls, layer: Any) -> "_Layer":
        attention, mlp = layer.self_attn, layer.mlp
        size = attention.head_dim
        query_heads = attention.q_proj.out_features // size
        key_heads = attention.k_proj.out_features // size
        return cls(
            _Norm.of(layer.input_layernorm),
            _Linear.of([attention.q_proj, attention.k_proj, attention.v_proj]),
            _HeadNorm.of(attention, query_heads, key_heads),
            query_heads,
            key_heads,
            size,
            attention.scaling,
            _Linear.of([attention.o_proj]),
            _Norm.of(layer.post_attention_layernorm),
            _Linear.of([mlp.gate_proj, mlp.up_proj]),
            _Linear.of([mlp.down_proj]),
        )

    def forward(self, x_NH: Tensor, turn: Turn, index: int, attention: Attention) -> Tensor:
        qkv_NTD = self.qkv(self.input_norm(x_NH)).view(x_NH.shape[0], -1, self.head_size)
        if self.head_norm:
            qk_NTD = qkv_NTD[:, : self.query_heads + self.key_heads]
            qk_NTD.copy_(self.head_norm(qk_NTD))
        attended_NH = attention.attend(index, qkv_NTD, turn, self.scale)
        x_NH = self.attention_out.add_to(x_NH, attended_NH)
        gate_NI, up_NI = self.gate_up(self.mlp_norm(x_NH)).chunk(2, dim=-1)
        return self.down.add_to(x_NH, silu(gate_NI) * up_NI)


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """One tensor of all rows; the parts become views of it."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0].detach()
    whole = torch.cat(parts)
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole
