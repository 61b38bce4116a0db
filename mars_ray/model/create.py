"""The model a training job starts from, as a model directory."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2ForCausalLM,
)

from mars_ray.config.model import ModelConfig, PresetModel, PretrainedModel
from mars_ray.errors import ModelError
from mars_ray.model.card import CARD_FILE, read_card
from mars_ray.model.load import load_model, load_tokenizer
from mars_ray.model.mask_token import ensure_mask_token
from mars_ray.model.presets import SHAPES, preset_config
from mars_ray.model.save import save_model
from mars_ray.model.stop import stop_at_turn_end
from mars_ray.model.tokenizer import train_tokenizer


def create_model(
    config: ModelConfig,
    texts: Callable[[], Iterable[str]],
    directory: str | Path,
    seed: int,
) -> None:
    """Writes the model directory of `config`, complete with mask token and card.

    `texts` is only called for presets, whose tokenizer is trained on them. The same arguments
    write the same files. Raises ModelError if a pretrained model cannot be used, a preset has too
    few rows for so many tokens, or the directory cannot be written.
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
    """A token without a row would end training or serving at the first text that has it.

    Special tokens (often one for padding) are in none, but for those that the template writes.
    Raises ModelError.
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
    """What an earlier MARS training has reached: a directory of ours may be trained further."""
    path = Path(config.path)
    return read_card(path).block_size if (path / CARD_FILE).exists() else 0
