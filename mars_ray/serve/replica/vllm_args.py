"""The arguments of vLLM's engine, and a request's parameters in its terms.

Every field of ours has one of vLLM's, or is refused by name: none is dropped.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.version import __version__ as VLLM_VERSION

from mars_ray.config.vllm import VllmConfig, VllmMars
from mars_ray.core.thresholds import Budget, Elastic
from mars_ray.decode.request import MOST_LOGPROBS, Request
from mars_ray.errors import ConfigError, RequestError
from mars_ray.vllm.settings import KEY, PROPOSER

# vLLM raises lower temperatures to this one.
_LEAST_TEMPERATURE = 0.01
_SEEDS = 1 << 64
# The model's own length, or as much of it as the cache of a GPU holds.
_AS_MEMORY_ALLOWS = -1


def engine_args(
    directory: Path, config: VllmConfig, masks: int, executor: str | None
) -> AsyncEngineArgs:
    """The arguments of an engine for a model directory, with so many masks of a request in a step;
    `executor` is vLLM's distributed_executor_backend, None for its own choice.

    Raises ConfigError for an argument that vLLM does not have, or does not take.
    """
    given: dict[str, Any] = {
        "model": str(directory),
        "max_num_seqs": config.max_batch,
        "max_model_len": config.max_context or _AS_MEMORY_ALLOWS,
        "max_num_batched_tokens": config.max_step_tokens,
        "enable_prefix_caching": config.prefix_cache,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "trust_remote_code": False,
        # Requests may have a priority.
        "scheduling_policy": "priority",
        # The grammars of requests are in its notation.
        "structured_outputs_config": StructuredOutputsConfig(backend="guidance"),
        # Log-probabilities are the model's own, before any temperature or penalty.
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": MOST_LOGPROBS,
        # Every step reports what it held, by which steps are counted and timed.
        "disable_log_stats": False,
        "enable_logging_iteration_details": True,
    }
    if config.cache_bytes is not None:
        given["kv_cache_memory_bytes"] = config.cache_bytes
    if config.gpu_memory_utilization is not None:
        given["gpu_memory_utilization"] = config.gpu_memory_utilization
    if executor is not None:
        given["distributed_executor_backend"] = executor
    if masks:
        given |= _drafting(config, masks)
    try:
        config.check_names((field.name for field in fields(AsyncEngineArgs)), VLLM_VERSION)
        return AsyncEngineArgs(**config.args | given)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def _drafting(config: VllmConfig, masks: int) -> dict[str, Any]:
    """The arguments by which the plug-in (`mars_ray/vllm`) drafts with so many masks."""
    mars = VllmMars(
        adapter=config.draft_adapter,
        adapters_change=adapters_change(config),
        masks_by_running=config.masks_by_running,
    )
    return {
        # Drafts and masks are speculative tokens, as many of the one as of the other.
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": 2 * masks,
        },
        "additional_config": {
            **config.args.get("additional_config", {}),
            KEY: mars.model_dump(mode="json"),
        },
    }


def adapters_change(config: VllmConfig) -> bool:
    """Whether the draft adapter may change while the engine runs: CUDA graphs keep theirs."""
    may_come = bool(config.draft_adapter or config.masks)
    return may_come and (current_platform.is_cpu() or bool(config.args.get("enforce_eager")))


def sampling_params(request: Request, drafts: bool) -> SamplingParams:
    """The request in vLLM's terms; `drafts` tells whether the engine verifies drafts.

    Raises RequestError for what vLLM does not do.
    """
    sampling, grammar = request.sampling, request.grammar
    _check(request, drafts)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        # vLLM takes -1 as no seed; as an unsigned number it is the same seed to torch.
        seed=sampling.seed % _SEEDS,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        min_tokens=sampling.min_new_tokens,
        max_tokens=request.max_new_tokens,
        logprobs=request.logprobs,
        stop_token_ids=sorted(request.stop_ids),
        ignore_eos=True,  # the request says where it ends
        structured_outputs=StructuredOutputsParams(grammar=grammar.source) if grammar else None,
        # Text, and stop strings in it, are the output processor's business.
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={KEY: _said(request)} if drafts else None,
        skip_clone=True,
    )


def _said(request: Request) -> dict[str, Any]:
    """How the plug-in is to decode a request."""
    own = request.mode.own_threshold
    if own is None:
        return {"drafts": False}
    match request.quality:
        case Elastic(floor):
            return {"floor": floor}
        case Budget(share):
            return {"budget": share}
        case None:
            pass
    return {"threshold": own}


def _check(request: Request, drafts: bool) -> None:
    sampling = request.sampling
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        raise RequestError(
            f"the vLLM engine samples at temperature {_LEAST_TEMPERATURE} or more: ask for that, "
            "or for 0",
            field="temperature",
        )
    unverified = [name for name in ("min_p", "logit_bias") if getattr(sampling, name)]
    if drafts and unverified:
        raise RequestError(
            f"vLLM does not support {unverified[0]} in an engine that verifies drafts: leave it "
            "out, or ask a service without drafts",
            field=unverified[0],
        )
