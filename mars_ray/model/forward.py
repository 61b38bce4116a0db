"""How training and the reference call a model: hidden states first, then the head on chosen rows.

The vocabulary projection dominates memory, so the caller decides which rows reach it. Decoding and
the training of drafts compute a model's layers themselves: what they support, and how they join
matrices, is here too.

Shape suffixes: B batch, R rows, H hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_ray.errors import ModelError

# Rotary embeddings whose angles depend only on the position.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def hidden_states(
    model: PreTrainedModel,
    input_ids_BR: Tensor,
    position_BR: Tensor,
    attention_mask: Any,
    **for_attention: Any,
) -> Tensor:
    """Last hidden states, (B, R, H).

    `attention_mask` is a boolean (B, 1, R, keys) tensor, True where a row may look, or a flex
    `BlockMask`. transformers passes either unchanged to its attention function, and so the other
    arguments.
    """
    output = model.base_model(
        input_ids=input_ids_BR,
        position_ids=position_BR,
        # Given by layer type, so that transformers builds no mask of its own.
        attention_mask=attention_mask,
        use_cache=False,
        **for_attention,
    )
    return output.last_hidden_state


def output_head(model: PreTrainedModel) -> nn.Module:
    """The projection from hidden states (..., H) to logits (..., V)."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module), f"{type(model).__name__} has no output head"
    return head


def check_layers(model: PreTrainedModel) -> None:
    """Raises ModelError for layers that neither decoding nor the training of drafts computes."""
    base: Any = model.base_model
    rope = base.rotary_emb.rope_type
    if rope not in _ROPE_TYPES:
        raise ModelError(
            f"rope_type {rope!r} is not supported; supported are {', '.join(_ROPE_TYPES)}"
        )
    if model.config.hidden_act != "silu":
        raise ModelError(f"activation {model.config.hidden_act!r} is not supported: only silu")


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows; the parts become its views, so that nothing is held twice."""
    if len(parts) == 1:
        return parts[0].detach()
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole


def head_norm_weight(attention: Any, query_heads: int, key_heads: int) -> Tensor | None:
    """Weights of Qwen3's norm of queries and keys, one row a head; None in other models."""
    if not hasattr(attention, "q_norm"):
        return None
    query, key = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    return torch.cat([query.expand(query_heads, -1), key.expand(key_heads, -1)])
