"""The model a training job starts from, as a model directory."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2ForCausalLM,
)

from mars_ray.config.model import ModelConfig, PresetModel, PretrainedModel
from mars_ray.model.card import CARD_FILE, read_card
from mars_ray.model.load import load_model, load_tokenizer
from mars_ray.model.mask_token import ensure_mask_token
from mars_ray.model.presets import SHAPES, preset_config
from mars_ray.model.save import save_model
from mars_ray.model.tokenizer import end_of_turn_id, train_tokenizer


def create_model(
    config: ModelConfig,
    texts: Callable[[], Iterable[str]],
    directory: str | Path,
    seed: int,
) -> None:
    """Writes the model directory of `config`, complete with mask token and card.

    `texts` is only called for presets, whose tokenizer is trained on them. The same arguments
    write the same files. Raises ModelError if a pretrained model cannot be used.
    """
    if isinstance(config, PresetModel):
        tokenizer = train_tokenizer(texts(), config.vocab_size)
        model = _random_model(config, len(tokenizer), seed)
        block_size = 0
    else:
        model = load_model(config.path, dtype=None, revision=config.revision)
        tokenizer = load_tokenizer(config.path, config.revision)
        block_size = _trained_block_size(config)
    card = replace(ensure_mask_token(model, tokenizer), block_size=block_size)
    _stop_at_turn_end(model, tokenizer)
    save_model(directory, model, tokenizer, card)


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


def _stop_at_turn_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Adds the template's end of turn to the tokens at which `generate` stops."""
    generation = model.generation_config
    if generation is None:
        generation = model.generation_config = GenerationConfig()
    given = generation.eos_token_id
    known = given if isinstance(given, list) else [] if given is None else [given]
    stops = list(dict.fromkeys([end_of_turn_id(tokenizer), *known]))
    generation.eos_token_id = stops[0] if len(stops) == 1 else stops
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
