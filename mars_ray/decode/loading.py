"""From a model directory to an engine that is ready."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mars_ray.config.decode import EngineConfig
from mars_ray.decode.engine import Engine
from mars_ray.decode.request import check_context
from mars_ray.model.card import ModelCard, read_card
from mars_ray.model.draft_adapter import read_draft_adapter, read_draft_card
from mars_ray.model.load import load_model, load_tokenizer

# Above this, bfloat16 is faster on a CPU; below it, float32 (docs/log.md).
_FLOAT32_PARAMETERS = 100_000_000


def load_engine(
    directory: str | Path, config: EngineConfig
) -> tuple[Engine, PreTrainedTokenizerBase]:
    """An engine for a model directory, warmed up, and its tokenizer. Raises MarsError."""
    draft_engine = None
    if config.draft_model:
        draft_engine = _load(config.draft_model, _draft_config(config))
        draft_engine.warm_up()
    engine = _load(directory, config, draft_engine)
    check_context(config.max_context, engine.model.config)
    engine.warm_up()
    return engine, load_tokenizer(directory)


def _draft_config(config: EngineConfig) -> EngineConfig:
    """Its prompts are texts with drafts behind them; small pages lose little of what is shared."""
    changes = {
        "draft_model": None,
        "draft_adapter": None,
        "max_context": config.max_context + config.max_step_tokens,
        "page_size": 4,
        "cache_bytes": None,
        "cache_memory_share": None,
        "prefix_cache": True,
        "window_control": False,
    }
    return config.model_copy(update=changes)


def _load(
    directory: str | Path, config: EngineConfig, draft_engine: Engine | None = None
) -> Engine:
    card = read_card(directory)
    if config.threads:
        torch.set_num_threads(config.threads)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # Float32 first would need twice the memory.
    is_half = config.dtype == "bfloat16" or (config.dtype == "auto" and device == "cuda")
    dtype = torch.bfloat16 if is_half else torch.float32
    model = load_model(directory, dtype=dtype, device=device)
    if config.dtype == "auto" and device == "cpu" and _prefers_bfloat16(model):
        # Not the buffers: rotary frequencies are float32 whatever the weights are.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    adapter = name = None
    if config.draft_adapter:
        adapter = read_draft_adapter(config.draft_adapter, directory, model.dtype)
        name = Path(config.draft_adapter).name
    return Engine(model, card, config, draft_engine, adapter, name)


def drafting_card(directory: str | Path, config: EngineConfig) -> ModelCard:
    """A model directory's card as an engine of this configuration has it: with the depth of its
    draft adapter. Reads no weights. Raises ModelError."""
    card = read_card(directory)
    if config.draft_adapter is None:
        return card
    return replace(card, block_size=read_draft_card(config.draft_adapter).depths)


def _prefers_bfloat16(model: PreTrainedModel) -> bool:
    """Whether it is the faster one on this CPU: for large models, and if it can multiply it."""
    multiplies = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return multiplies and model.num_parameters() > _FLOAT32_PARAMETERS
