"""From a model directory to a client of a vLLM engine that runs."""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

import asyncio
import os
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from vllm.config import VllmConfig as EngineArguments
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from mars_ray.config.vllm_engine import VllmConfig
from mars_ray.decode.request import EngineFacts, EngineInfo
from mars_ray.errors import ModelError
from mars_ray.model.directory import read_card
from mars_ray.model.draft_adapter import read_draft_card
from mars_ray.model.load import load_tokenizer
from mars_ray.model.stop import stop_ids_of
from mars_ray.serve.replica.vllm_args import adapters_change, engine_args
from mars_ray.serve.replica.vllm_client import Mars, VllmClient

_ENVIRONMENT = {
    # A replica has threads, which a forked process would miss.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
}


async def load_vllm(
    directory: Path, config: VllmConfig, executor: str | None = None
) -> tuple[VllmClient, PreTrainedTokenizerBase]:
    """The client of a started engine, warmed up, and the model's tokenizer.

    `executor` is as in `engine_args`. Raises ConfigError and ModelError.
    """
    # In a thread, because vLLM would bind itself to a running loop.
    client, tokenizer = await asyncio.to_thread(loaded, directory, config, executor)
    client.start()
    await client.warm_up()
    return client, tokenizer


def loaded(
    directory: Path, config: VllmConfig, executor: str | None = None
) -> tuple[VllmClient, PreTrainedTokenizerBase]:
    """The same, but neither started nor warmed up. Must not be called in an event loop."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    tokenizer = load_tokenizer(directory)
    stops = stop_ids_of(directory, tokenizer)
    card = read_card(directory)
    adapter = config.draft_adapter
    depths = read_draft_card(adapter).depths if adapter else card.block_size
    masks = config.masks or depths
    if masks:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the plug-in extends the other one
    args = engine_args(directory, config, masks, executor)
    try:
        llm = AsyncLLM.from_engine_args(args)
    except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
        raise ModelError(f"vLLM does not start with {directory}: {error}") from error
    vocabulary = llm.model_config.get_vocab_size()
    facts = EngineFacts(config.max_context, config.max_batch, vocabulary, stops)
    name = Path(adapter).name if adapter else None
    mars = Mars(directory, card, masks, name, depths, adapters_change(config))
    return VllmClient(llm, config, facts, _info(llm.vllm_config), mars), tokenizer


def _info(config: EngineArguments) -> EngineInfo:
    model, cache = config.model_config, config.cache_config
    tokens = (cache.num_gpu_blocks or 0) * cache.block_size
    heads = model.get_num_kv_heads(config.parallel_config)
    layers = model.get_num_layers(config.parallel_config)
    assert isinstance(model.dtype, torch.dtype)
    token_bytes = 2 * layers * heads * model.get_head_size() * model.dtype.itemsize
    device = current_platform.get_device_name() if current_platform.is_cuda() else "cpu"
    backend = config.attention_config.backend
    return EngineInfo(
        engine="vllm",
        dtype=str(model.dtype).removeprefix("torch."),
        device=device,
        attention=backend.name.lower() if backend else "auto",
        instructions=None,
        threads=torch.get_num_threads(),
        cache_bytes=tokens * token_bytes,
        cache_tokens=tokens,
    )
