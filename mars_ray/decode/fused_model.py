"""The model's forward for the rows of a step, over the checkpoint's own weights.

A decoding step has few rows, so the call of a Hugging Face model costs more than its arithmetic.
Here a layer is a dozen operations. The results are those of transformers, as tests check for each
architecture (`tests/decode/test_fused_model.py`).

With a draft adapter (`adapter.py`) the last rows of a forward are its masks. They have their own
embeddings and products; all other rows are computed as without an adapter.

Shape suffixes: N rows of a forward, P rows that are read, M mask rows, H hidden size (key-value
heads where D follows), T heads of queries, keys and values together, D head size, I size of the
feed-forward layer, V vocabulary.
"""

import time
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu
from transformers import PreTrainedModel

from mars_ray.core.draft_head import likeliest
from mars_ray.decode.adapter import FusedAdapter, LayerLora, MaskRows
from mars_ray.decode.linear import Linear, ReorderedLinear, linear_of
from mars_ray.errors import ModelError
from mars_ray.model.forward import output_head

# Rotary embeddings whose angles depend only on the position.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# The number of a row's largest logits that are computed again: rounding may have made them equal.
_READ_AGAIN = 8


# Rotary position embedding of a forward's rows: cosines and sines, (N, 1, D) each, the same for all
# heads. The sines contain the sign that rotating a pair needs.
Turn = tuple[Tensor, Tensor]


class Attention(Protocol):
    """Attention of one forward's rows over the cache and over each other."""

    def attend(self, layer: int, qkv_NTD: Tensor, turn: Turn, scale: float) -> Tensor:
        """Rotate queries and keys, store keys and values, and attend: (N, query heads * D)."""
        ...


class FusedModel:
    """A model of `load.ARCHITECTURES`, whose matrices it takes over. If they are reordered
    (`linear.py`), the original model cannot be used any more; only a tied head is held twice.

    Rows see everything before them, so a sliding window has to cover the context."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, positions: int) -> None:
        """For sequences of at most `positions`. Raises ModelError for what is unsupported."""
        base: Any = model.base_model
        rope = base.rotary_emb.rope_type
        if rope not in _ROPE_TYPES:
            raise ModelError(
                f"rope_type {rope!r} is not supported by the decoding engine; supported are "
                f"{', '.join(_ROPE_TYPES)}"
            )
        if model.config.hidden_act != "silu":
            raise ModelError(f"activation {model.config.hidden_act!r} is not supported: only silu")
        self.device, self.dtype = model.device, model.dtype
        # Time spent in the model so far; on a GPU, in launching it and waiting for its results.
        self.seconds = 0.0
        self.adapter: FusedAdapter | None = None
        self._embedding: Tensor = base.embed_tokens.weight
        self._layers = [_Layer.of(layer, self._embedding) for layer in base.layers]
        self._norm = _Norm.of(base.norm)
        head = cast(nn.Linear, output_head(model))
        self._is_tied = head.weight is self._embedding
        self._head = linear_of([head], self._embedding)
        is_dense = self._is_tied or isinstance(self._head, Linear)
        self._dense_vocabulary: Tensor | None = head.weight if is_dense else None
        self.vocabulary_VH: Tensor | None = None
        index_1N = torch.arange(positions, device=model.device)[None]
        cos_1ND, sin_1ND = base.rotary_emb(self._embedding[:1], index_1N)
        half = cos_1ND.shape[-1] // 2
        self._cos_sin = torch.stack([cos_1ND[0], sin_1ND[0]], dim=1)
        self._cos_sin[:, 1, :half].neg_()

    def hidden_states(
        self,
        ids_N: Tensor,
        position_N: Tensor,
        attention: Attention,
        masks: MaskRows | None = None,
    ) -> Tensor:
        """Last hidden states, (N, H); keys and values go into the cache.

        With an adapter, the ids of `masks` are their depths, from 0.
        """
        started = time.perf_counter()
        loras: Several[LayerLora | None] = [None] * len(self._layers)
        if masks and self.adapter:
            x_NH = masks.embedded(ids_N, self._embedding, self.adapter.mask_embedding_DH)
            loras = self.adapter.layers or loras
        else:
            x_NH = self.embed(ids_N)
        cos_N1D, sin_N1D = self._cos_sin.index_select(0, position_N).split(1, dim=1)
        turn = cos_N1D, sin_N1D
        for index, (layer, lora) in enumerate(zip(self._layers, loras, strict=True)):
            x_NH = layer.forward(x_NH, turn, index, attention, lora, masks)
        x_NH = self._norm(x_NH)
        self.seconds += time.perf_counter() - started
        return x_NH

    def embed(self, ids_N: Tensor) -> Tensor:
        """Embeddings of tokens, (N, H)."""
        return embedding(ids_N, self._embedding)

    def set_adapter(self, adapter: FusedAdapter | None) -> None:
        """Set the adapter for masks from the next forward on."""
        self.adapter = adapter
        # The sequential head multiplies with the rows of candidates, so it needs the usual order.
        self.vocabulary_VH = None
        if adapter and adapter.head:
            self.vocabulary_VH = self._embedding if self._is_tied else self._head.dense()

    def logits(self, hidden_PH: Tensor) -> Tensor:
        """Logits of rows in float32, (P, V)."""
        started = time.perf_counter()
        logits_PV = self._head(hidden_PH).float()
        self.seconds += time.perf_counter() - started
        return logits_PV

    def read_again(self, hidden_PH: Tensor, logits_PV: Tensor) -> None:
        """Compute the largest logits of each row once more, as float32 products, in place.

        In bfloat16 a logit of 20 is rounded to a multiple of 0.125, so several tokens are often
        equally likely. Nothing is done where the vocabulary's matrix is reordered.
        """
        vocabulary_VH = self._dense_vocabulary
        if self.dtype == torch.float32 or vocabulary_VH is None:
            return
        started = time.perf_counter()
        token_PC = likeliest(logits_PV, _READ_AGAIN)
        weight_PCH = embedding(token_PC, vocabulary_VH).float()
        exact_PC = (weight_PCH @ hidden_PH.float()[:, :, None]).squeeze(-1)
        # Logits of tokens that are never emitted stay at -inf.
        known_PC = logits_PV.gather(-1, token_PC)
        logits_PV.scatter_(-1, token_PC, torch.where(known_PC.isinf(), known_PC, exact_PC))
        self.seconds += time.perf_counter() - started


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
    """Qwen3's norm, applied to every query and key head separately."""

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
    qkv: Linear | ReorderedLinear
    head_norm: _HeadNorm | None
    query_heads: int
    key_heads: int
    head_size: int
    scale: float
    attention_out: Linear | ReorderedLinear
    mlp_norm: _Norm
    gate_up: Linear | ReorderedLinear
    down: Linear | ReorderedLinear

    @classmethod
    def of(cls, layer: Any, keep: Tensor) -> "_Layer":
        attention, mlp = layer.self_attn, layer.mlp
        size = attention.head_dim
        query_heads = attention.q_proj.out_features // size
        key_heads = attention.k_proj.out_features // size
        return cls(
            _Norm.of(layer.input_layernorm),
            linear_of([attention.q_proj, attention.k_proj, attention.v_proj], keep),
            _HeadNorm.of(attention, query_heads, key_heads),
            query_heads,
            key_heads,
            size,
            attention.scaling,
            linear_of([attention.o_proj], keep),
            _Norm.of(layer.post_attention_layernorm),
            linear_of([mlp.gate_proj, mlp.up_proj], keep),
            linear_of([mlp.down_proj], keep),
        )

    def forward(
        self,
        x_NH: Tensor,
        turn: Turn,
        index: int,
        attention: Attention,
        lora: LayerLora | None,
        masks: MaskRows | None,
    ) -> Tensor:
        normed_NH = self.input_norm(x_NH)
        qkv_NX = self.qkv(normed_NH)
        if lora and masks:
            masks.add(lora.qkv, qkv_NX, normed_NH)
        qkv_NTD = qkv_NX.view(x_NH.shape[0], -1, self.head_size)
        if self.head_norm:
            qk_NTD = qkv_NTD[:, : self.query_heads + self.key_heads]
            qk_NTD.copy_(self.head_norm(qk_NTD))
        attended_NH = attention.attend(index, qkv_NTD, turn, self.scale)
        x_NH = self.attention_out.add_to(x_NH, attended_NH)
        if lora and masks:
            masks.add(lora.attention_out, x_NH, attended_NH)
        normed_NH = self.mlp_norm(x_NH)
        gate_up_NX = self.gate_up(normed_NH)
        if lora and masks:
            masks.add(lora.gate_up, gate_up_NX, normed_NH)
        gate_NI, up_NI = gate_up_NX.chunk(2, dim=-1)
        inner_NI = silu(gate_NI).mul_(up_NI)
        x_NH = self.down.add_to(x_NH, inner_NI)
        if lora and masks:
            masks.add(lora.down, x_NH, inner_NI)
        return x_NH
