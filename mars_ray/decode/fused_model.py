"""The model's forward for the rows of a step in torch, over the checkpoint's own weights: on a GPU,
and where there is no compiled step (`cpu/`).

A decoding step has few rows, so the call of a Hugging Face model costs more than its arithmetic.
Here a layer is a dozen operations. The results are those of transformers, as tests check for each
architecture (`tests/decode/test_fused_model.py`).

With a draft adapter (`adapter.py`) the last rows of a forward are its masks. They have their own
embeddings and products; all other rows are computed as without an adapter.

Shape suffixes: N rows of a forward, P rows that are read, M mask rows, H hidden size (key-value
heads where D follows), T heads of queries, keys and values together, D head size, I size of the
feed-forward layer, V vocabulary, O outputs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu
from transformers import PreTrainedModel

from mars_ray.decode.adapter import FusedAdapter, MaskRows
from mars_ray.model.draft_adapter import LoraProduct
from mars_ray.model.forward import check_layers, head_norm_weight, joined, output_head

# Rotary position embedding of a forward's rows: cosines and sines, (N, 1, D) each, the same for all
# heads. The sines contain the sign that rotating a pair needs.
Turn = tuple[Tensor, Tensor]
# Attention of one forward's rows over the cache and over each other: of a layer's queries, keys and
# values, (N, T, D), with a turn and a scale, to (N, query heads * D).
Attention = Callable[[int, Tensor, Turn, float], Tensor]


class FusedModel:
    """A model of `directory.ARCHITECTURES`, whose matrices it joins and shares.

    Rows see everything before them, so a sliding window has to cover the context."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, positions: int) -> None:
        """For sequences of at most `positions`. Raises ModelError for what is unsupported."""
        check_layers(model)
        base: Any = model.base_model
        self.device, self.dtype = model.device, model.dtype
        # Time spent in the model so far; on a GPU, in launching it and waiting for its results.
        self.seconds = 0.0
        self.adapter: FusedAdapter | None = None
        self._embedding: Tensor = base.embed_tokens.weight
        self._layers = [_Layer.of(layer) for layer in base.layers]
        self._norm_H, self._epsilon = base.norm.weight, base.norm.variance_epsilon
        head = cast(nn.Linear, output_head(model))
        # Of the usual order, as the sequential head multiplies with the rows of candidates.
        self.vocabulary_VH = head.weight
        self._head = linear_of([head])
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
        loras: list[dict[str, LoraProduct]] = [{}] * len(self._layers)
        if masks and self.adapter:
            x_NH = masks.embedded(ids_N, self._embedding, self.adapter.mask_embedding_DH)
            loras = self.adapter.layers or loras
        else:
            x_NH = self.embed(ids_N)
        cos_N1D, sin_N1D = self._cos_sin.index_select(0, position_N).split(1, dim=1)
        turn = cos_N1D, sin_N1D
        for index, (layer, lora) in enumerate(zip(self._layers, loras, strict=True)):
            x_NH = layer.forward(x_NH, turn, index, attention, lora, masks)
        x_NH = torch.rms_norm(x_NH, x_NH.shape[1:], self._norm_H, self._epsilon)
        self.seconds += time.perf_counter() - started
        return x_NH

    def embed(self, ids_N: Tensor) -> Tensor:
        """Embeddings of tokens, (N, H)."""
        return embedding(ids_N, self._embedding)

    def logits(self, hidden_PH: Tensor) -> Tensor:
        """Logits of rows in float32, (P, V)."""
        started = time.perf_counter()
        logits_PV = self._head(hidden_PH).float()
        self.seconds += time.perf_counter() - started
        return logits_PV


@dataclass(frozen=True, slots=True)
class Linear:
    """A product with the weight transposed, which suits matrix products."""

    weight_IO: Tensor
    bias_O: Tensor | None

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self.bias_O is None:
            return torch.mm(x_NI, self.weight_IO)
        return torch.addmm(self.bias_O, x_NI, self.weight_IO)

    def add_to(self, residual_NO: Tensor, x_NI: Tensor) -> Tensor:
        """The product and the residual connection in one operation."""
        sum_NO = torch.addmm(residual_NO, x_NI, self.weight_IO)
        return sum_NO if self.bias_O is None else sum_NO.add_(self.bias_O)


def linear_of(modules: list[nn.Linear]) -> Linear:
    """Linear layers with the same input, joined into one; all have biases or none has. Their
    weights become views of the joined one."""
    weight_OI = joined([module.weight for module in modules])
    biases = [module.bias for module in modules if module.bias is not None]
    return Linear(weight_OI.t(), joined(biases) if biases else None)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer."""

    epsilon: float  # of its norms
    input_norm_H: Tensor
    qkv: Linear
    head_norm_TD: Tensor | None  # Qwen3's, of every query and key head by itself
    head_size: int
    scale: float
    attention_out: Linear
    mlp_norm_H: Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, layer: Any) -> "_Layer":
        attention, mlp = layer.self_attn, layer.mlp
        size = attention.head_dim
        heads = [part.out_features // size for part in (attention.q_proj, attention.k_proj)]
        return cls(
            layer.input_layernorm.variance_epsilon,
            layer.input_layernorm.weight,
            linear_of([attention.q_proj, attention.k_proj, attention.v_proj]),
            head_norm_weight(attention, *heads),
            size,
            attention.scaling,
            linear_of([attention.o_proj]),
            layer.post_attention_layernorm.weight,
            linear_of([mlp.gate_proj, mlp.up_proj]),
            linear_of([mlp.down_proj]),
        )

    def forward(
        self,
        x_NH: Tensor,
        turn: Turn,
        index: int,
        attention: Attention,
        lora: dict[str, LoraProduct],
        masks: MaskRows | None,
    ) -> Tensor:
        normed_NH = torch.rms_norm(x_NH, x_NH.shape[1:], self.input_norm_H, self.epsilon)
        qkv_NX = self.qkv(normed_NH)
        if lora and masks:
            masks.add(lora.get("qkv"), qkv_NX, normed_NH)
        qkv_NTD = qkv_NX.view(x_NH.shape[0], -1, self.head_size)
        if self.head_norm_TD is not None:
            qk_NTD = qkv_NTD[:, : len(self.head_norm_TD)]
            normed_NTD = torch.rms_norm(qk_NTD, (self.head_size,), None, self.epsilon)
            qk_NTD.copy_(normed_NTD * self.head_norm_TD)
        attended_NH = attention(index, qkv_NTD, turn, self.scale)
        x_NH = self.attention_out.add_to(x_NH, attended_NH)
        if lora and masks:
            masks.add(lora.get("attention_out"), x_NH, attended_NH)
        normed_NH = torch.rms_norm(x_NH, x_NH.shape[1:], self.mlp_norm_H, self.epsilon)
        gate_up_NX = self.gate_up(normed_NH)
        if lora and masks:
            masks.add(lora.get("gate_up"), gate_up_NX, normed_NH)
        gate_NI, up_NI = gate_up_NX.chunk(2, dim=-1)
        inner_NI = silu(gate_NI).mul_(up_NI)
        x_NH = self.down.add_to(x_NH, inner_NI)
        if lora and masks:
            masks.add(lora.get("down"), x_NH, inner_NI)
        return x_NH
