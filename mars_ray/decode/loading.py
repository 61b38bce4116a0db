"""From a model directory to an engine that is ready."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import Mode
from mars_ray.decode.cpu.library import is_available
from mars_ray.decode.engine import Engine
from mars_ray.decode.kv_cache import model_context
from mars_ray.decode.request import check_context, window_of
from mars_ray.errors import EngineError, ModelError
from mars_ray.model.directory import ModelCard, read_card
from mars_ray.model.draft_adapter import read_draft_adapter, read_draft_card
from mars_ray.model.load import (
    load_model,
    load_tokenizer,
    multiplies_bfloat16,
    not_finite,
    read_config,
    stop_at_turn_end,
    stored_dtype,
    stored_weights,
)

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_engine(
    directory: str | Path, config: EngineConfig
) -> tuple[Engine, PreTrainedTokenizerBase]:
    """An engine for a model directory, warmed up, and its tokenizer. Raises MarsError."""
    card, model = read_card(directory), engine_model(directory, config)
    check_context(config.max_context, model.config)
    adapter = name = None
    if config.draft_adapter:
        adapter = read_draft_adapter(config.draft_adapter, directory, model.dtype)
        name = Path(config.draft_adapter).name
    engine = Engine(model, card, config, adapter, name, release=True)
    try:
        engine.warm_up()
    except EngineError as error:
        if name := not_finite(stored_weights(directory)):
            raise ModelError(
                f"{directory} cannot be run: its weight {name} holds NaN or infinite numbers. "
                "Fetch or train the model again"
            ) from error
        raise
    tokenizer = load_tokenizer(directory)
    if tokenizer.chat_template:
        # Answers end with the turn: many model configurations name only the token that ends a text.
        try:
            stop_at_turn_end(engine.model, tokenizer)
        except ModelError as error:
            logger.warning("answers end only where generation_config.json says so: %s", error)
    return engine, tokenizer


def engine_model(directory: str | Path, config: EngineConfig) -> PreTrainedModel:
    """The model alone, where and in the dtype in which an engine of this configuration has it.
    Raises ModelError."""
    if config.threads:
        torch.set_num_threads(config.threads)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return load_model(directory, dtype=_dtype(directory, config, device), device=device)


def with_room(config: EngineConfig, directory: str | Path, tokens: int) -> EngineConfig:
    """The configuration of an engine for prompts and answers of so many tokens. Where it names no
    context, it gets no more than that, and no more than the model's. Raises ModelError."""
    if config.max_context is not None:
        return config
    context = min(tokens, model_context(read_config(directory)))
    return config.model_copy(update={"max_context": max(8, context)})  # the least that it takes


def drafting_card(directory: str | Path, config: EngineConfig) -> ModelCard:
    """A model directory's card as an engine of this configuration has it, with the depth of its
    draft adapter. Reads no weights. Raises ModelError."""
    card = read_card(directory)
    if config.draft_adapter is None:
        return card
    return replace(card, block_size=read_draft_card(config.draft_adapter).depths)


def check_engine(directory: str | Path, config: EngineConfig, modes: Iterable[Mode]) -> None:
    """Raises MarsError for what an engine of this model would refuse, as far as that is known
    without its weights: a context, an adapter, modes."""
    check_context(config.max_context, read_config(directory))
    if config.draft_adapter:
        read_draft_adapter(config.draft_adapter, directory)
    card = drafting_card(directory, config)
    for mode in modes:
        window_of(mode, card)


def _dtype(directory: str | Path, config: EngineConfig, device: str) -> torch.dtype:
    """The checkpoint's own dtype, unless the device does not support it."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    stored = stored_dtype(directory)
    if stored not in (torch.float16, torch.bfloat16):
        return torch.float32
    if device != "cpu":
        return stored
    # The compiled step multiplies in float32 where the processor has no other way: half the bytes
    # of the weights are half the time all the same.
    if config.attention_backend != "dense" and is_available(config.cpu_instructions):
        return torch.bfloat16
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32
