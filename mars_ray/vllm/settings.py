"""What a vLLM configuration says about MARS, checked.

speculative_config = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 8}
additional_config = {"mars": {"adapter": "adapters/smollm2"}}
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

from mars_ray.config.load import explain
from mars_ray.config.vllm import VllmMars, VllmMarsRequest
from mars_ray.errors import ConfigError
from mars_ray.model.directory import CARD_FILE, read_card
from mars_ray.model.draft_adapter import DraftAdapter, read_draft_adapter
from mars_ray.vllm.adapter import ARCHITECTURES

# What `model` of vLLM's speculative_config must be.
PROPOSER = "mars_ray.vllm.proposer.MarsProposer"
KEY = "mars"


@dataclass(frozen=True, slots=True)
class Settings:
    """MARS decoding of one model: by an adapter, or by the mask token that it was trained with."""

    options: VllmMars
    masks: int  # most of a request in a step; there are as many drafts at most
    adapter: DraftAdapter | None
    mask_token_id: int | None
    directory: Path  # the model's
    own_depths: int  # that the model itself was trained for


def asked_for(config: VllmConfig) -> bool:
    """Whether the configuration asks for MARS."""
    speculative = config.speculative_config
    return speculative is not None and speculative.model == PROPOSER


def options(config: VllmConfig) -> VllmMars:
    """What `additional_config` says. Raises ConfigError."""
    additional: Any = config.additional_config
    content = additional.get(KEY, {}) if isinstance(additional, dict) else {}
    try:
        return VllmMars.model_validate(content)
    except ValidationError as error:
        source = f"additional_config of vLLM, key {KEY!r}"
        raise ConfigError(explain(error, source, VllmMars)) from None


def request_options(params: SamplingParams) -> VllmMarsRequest:
    """What a request's `extra_args` say: a table, or its JSON, because vLLM's HTTP bodies hold no
    tables there. Raises ConfigError."""
    content = (params.extra_args or {}).get(KEY, {})
    try:
        if isinstance(content, str):
            return VllmMarsRequest.model_validate_json(content)
        return VllmMarsRequest.model_validate(content)
    except ValidationError as error:
        source = f"extra_args of the request, key {KEY!r}"
        raise ConfigError(explain(error, source, VllmMarsRequest)) from None


def read(config: VllmConfig) -> Settings:
    """The settings with their adapter. Raises ConfigError or ModelError."""
    own = options(config)
    _check_engine(config)
    directory = _directory(config)
    adapter = None
    card = read_card(directory)
    if own.adapter:
        adapter = read_draft_adapter(own.adapter, directory)
    depths = adapter.card.depths if adapter else card.block_size
    if not depths and not own.adapters_change:
        raise ConfigError(
            f"{directory} was not trained by MARS (it has no {CARD_FILE}): name a draft adapter in "
            f'additional_config, {{"{KEY}": {{"adapter": "DIRECTORY"}}}}'
        )
    masks = _masks(config, None if own.adapters_change else depths)
    return Settings(own, masks, adapter, card.trained_mask_id, directory, card.block_size)


def _directory(config: VllmConfig) -> Path:
    """Where vLLM has the model's files; a hub's name is looked up in the cache that it filled."""
    model = config.model_config
    if Path(model.model).is_dir():
        return Path(model.model)
    return Path(
        snapshot_download(
            model.model,
            revision=model.revision,
            cache_dir=config.load_config.download_dir,
            local_files_only=True,
        )
    )


def _check_engine(config: VllmConfig) -> None:
    """Raises ConfigError for what the plug-in cannot do."""
    speculative = config.speculative_config
    assert speculative is not None
    names = config.model_config.architectures
    if not set(names) & set(ARCHITECTURES):
        raise ConfigError(
            f"MARS in vLLM decodes {', '.join(ARCHITECTURES)}; this model is {', '.join(names)}"
        )
    if config.use_v2_model_runner:
        raise ConfigError(
            "MARS in vLLM works with the V1 model runner, and this engine has the newer one: set "
            "VLLM_USE_V2_MODEL_RUNNER=0 in the environment"
        )
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError(
            "MARS in vLLM does not work with pipeline_parallel_size > 1: use "
            "tensor_parallel_size instead"
        )
    if speculative.num_speculative_tokens_per_batch_size is not None:
        raise ConfigError(
            "num_speculative_tokens_per_batch_size has no effect on MARS: say masks_by_running in "
            f"additional_config, key {KEY!r}"
        )


def _masks(config: VllmConfig, depths: int | None) -> int:
    """Masks of a request: half of its speculative tokens, because as many are drafts; of `depths`,
    unless a deeper adapter may come."""
    assert config.speculative_config is not None
    tokens = config.speculative_config.num_speculative_tokens
    if tokens % 2 or tokens < 2 or (depths and tokens > 2 * depths):
        limit = f" and at most {2 * depths}, twice the depth that was trained" if depths else ""
        raise ConfigError(
            f"num_speculative_tokens is {tokens}: it counts drafts and as many masks, so it must "
            f"be even{limit}"
        )
    return tokens // 2
