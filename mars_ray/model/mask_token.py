"""Choosing the token that stands for a token not yet known.

A model that was never trained with masks has none, and growing the vocabulary changes the shape
of its checkpoint, so slots that exist and mean nothing are preferred.

Shape suffixes: V rows of the vocabulary, H hidden size.
"""

import re
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mars_ray.model.card import ModelCard
from mars_ray.model.tokenizer import MASK

# Llama 3: <|reserved_special_token_7|>; others: <unused7>, <|unused_7|>, <|extra_7|>.
_RESERVED = re.compile(r"^<\|?(reserved|unused|extra)[a-z_]*_?\d+\|?>$")


def ensure_mask_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ModelCard:
    """Gives the tokenizer a mask token, and the model a row for it if it has none to spare.

    The first that applies: the tokenizer's own mask token; an unused special token; a new token on
    an embedding row that no token has; a new token on a new row.
    """
    if tokenizer.mask_token is None:
        token: Any = _reserved_token(tokenizer) or MASK
        tokenizer.add_special_tokens({"mask_token": token})
    mask_id = tokenizer.mask_token_id
    assert isinstance(mask_id, int)
    if mask_id >= len(_weight(model.get_input_embeddings())):
        _grow(model, mask_id + 1)
    return ModelCard(mask_token=str(tokenizer.mask_token), mask_token_id=mask_id, block_size=0)


def _reserved_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The unused special token with the lowest id."""
    in_use = set(tokenizer.special_tokens_map.values())
    template = str(tokenizer.chat_template)
    for _, added in sorted(tokenizer.added_tokens_decoder.items()):
        text = added.content
        if added.special and _RESERVED.match(text) and text not in in_use and text not in template:
            return text
    return None


def _grow(model: PreTrainedModel, rows: int) -> None:
    """Adds rows to the embedding and the head; they start at the mean of the others.

    A random row would be drawn from whatever state the generator is in, and far from the rest.
    """
    old = len(_weight(model.get_input_embeddings()))
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            weight_VH = _weight(layer)
            weight_VH[old:] = weight_VH[:old].float().mean(0).to(weight_VH.dtype)


def _weight(layer: torch.nn.Module | None) -> torch.Tensor:
    """One row a token, (V, H)."""
    assert layer is not None
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight
