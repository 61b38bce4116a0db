"""How training and the reference call a model: hidden states first, the head where it is wanted.

The vocabulary projection dominates memory, so which rows reach it is the caller's decision.

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
    `BlockMask`; transformers hands both to its attention function as they are, and what else is
    given too.
    """
    output = model.base_model(
        input_ids=input_ids_BR,
        position_ids=position_BR,
        # By layer type: transformers then builds no mask of its own.
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
