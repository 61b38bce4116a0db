"""How training and the reference call a model: hidden states first, then the head on chosen rows.

The vocabulary projection dominates memory, so the caller decides which rows reach it.

Shape suffixes: B batch, R rows, H hidden size.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


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
