"""Creates the model that a training job starts from, as a model directory with a mask token.

A model that was never trained with masks has no mask token. Growing the vocabulary would change the
shape of its checkpoint, so existing unused tokens are preferred.

Shape suffixes: V rows of the vocabulary, H hidden size.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2ForCausalLM,
)

from mars_ray.config.model import ModelConfig, PresetModel, PretrainedModel
from mars_ray.errors import ModelError
from mars_ray.model.card import CARD_FILE, ModelCard, read_card
from mars_ray.model.load import load_model, load_tokenizer
from mars_ray.model.presets import MASK, SHAPES, preset_config, train_tokenizer
from mars_ray.model.save import save_model
from mars_ray.model.stop import stop_at_turn_end

# Llama 3: <|reserved_special_token_7|>; others: <unused7>, <|unused_7|>, <|extra_7|>.
_RESERVED = re.compile(r"^<\|?(reserved|unused|extra)[a-z_]*_?\d+\|?>$")


def create_model(
    config: ModelConfig,
    texts: Callable[[], Iterable[str]],
    directory: str | Path,
    seed: int,
) -> None:
    """Writes the model directory of `config`, complete with mask token and card.

    `texts` is only called for presets, whose tokenizer is trained on them. The same arguments
    write the same files. Raises ModelError if a pretrained model cannot be used, a preset has fewer
    rows than the tokenizer has tokens, or the directory cannot be written.
    """
    if isinstance(config, PresetModel):
        _check_preset(config)
        tokenizer = train_tokenizer(texts(), config.vocab_size)
        model = _random_model(config, len(tokenizer), seed)
        block_size = 0
    else:
        model = load_model(config.path, dtype=None, revision=config.revision)
        tokenizer = load_tokenizer(config.path, config.revision)
        block_size = _trained_block_size(config)
    card = replace(ensure_mask_token(model, tokenizer), block_size=block_size)
    check_rows(model, tokenizer)
    stop_at_turn_end(model, tokenizer)
    try:
        save_model(directory, model, tokenizer, card)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write {directory}: {error}. Free space, and run again") from error


def _check_preset(config: PresetModel) -> None:
    rows = SHAPES[config.preset].rows
    if rows is not None and config.vocab_size > rows:
        raise ModelError(
            f"model.vocab_size {config.vocab_size} is too large: {config.preset} has {rows} rows"
        )


def check_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ModelError if a token that texts may have lacks an embedding row.

    Such a token would end training or serving at the first text that has it. Special tokens (often
    one for padding) occur in no text, except those that the template writes.
    """
    rows = model.config.vocab_size
    template = str(tokenizer.chat_template)
    added = tokenizer.added_tokens_decoder.values()
    unused = {token.content for token in added if token.special and token.content not in template}
    beyond = [t for t, i in tokenizer.get_vocab().items() if i >= rows and t not in unused]
    if beyond:
        raise ModelError(
            f"the tokenizer has {len(beyond)} tokens, such as {beyond[0]!r}, for which the model's "
            f"embedding of {rows} rows has none: it is another model's tokenizer, or tokens were "
            "added without resizing the embedding"
        )


def _random_model(config: PresetModel, vocabulary: int, seed: int) -> Qwen2ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(preset_config(config.preset, vocabulary))
    torch.nn.Module.to(model, dtype=SHAPES[config.preset].dtype)
    return model


def _trained_block_size(config: PretrainedModel) -> int:
    """The block size of an earlier MARS training: our own directories may be trained further."""
    path = Path(config.path)
    return read_card(path).block_size if (path / CARD_FILE).exists() else 0


def ensure_mask_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ModelCard:
    """Gives the tokenizer a mask token, and the model a row for it if none is free.

    Takes the first that exists: the tokenizer's own mask token; an unused special token; a new
    token on an unused embedding row; a new token on a new row.
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

    Random rows would depend on the generator's state and lie far from the others.
    """
    old = len(_weight(model.get_input_embeddings()))
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            weight_VH = _weight(layer)
            weight_VH[old:] = weight_VH[:old].float().mean(0).to(weight_VH.dtype)


def _weight(layer: torch.nn.Module | None) -> torch.Tensor:
    """A layer's weight with one row per token, (V, H)."""
    assert layer is not None
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight
