"""vLLM as a service's engine: its arguments, and what is said to MARS's plug-in within it.

The plug-in reads `additional_config` and a request's `extra_args`, both under the key `mars`.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    model_validator,
)

from mars_ray.config.base import AdapterPath, AnyAdapterPath, Config
from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode

# Names of vLLM for what has a field of its own here.
VLLM_NAMES = {
    "max_num_seqs": "max_batch",
    "max_model_len": "max_context",
    "max_num_batched_tokens": "max_step_tokens",
    "kv_cache_memory_bytes": "cache_bytes",
    "enable_prefix_caching": "prefix_cache",
    "served_model_name": "model_name",
}
# And for what is decided elsewhere.
_SAID_BY = VLLM_NAMES | {
    "speculative_config": "draft_adapter, or a checkpoint trained by `mars-ray train`",
    "model": "the job's checkpoint",
    "tokenizer": "the job's checkpoint",
    "revision": "the job's revision",
    "served_model_name": "the job's model_name",
}
# What would have no effect: requests of this service name no LoRA of their own.
_UNUSED = ("enable_lora", "lora_modules", "max_loras", "max_lora_rank")
# What the service relies on (`serve/replica/vllm_terms.py`).
_FIXED = (
    "disable_log_stats",
    "enable_log_requests",
    "enable_logging_iteration_details",
    "logprobs_mode",
    "max_logprobs",
    "scheduling_policy",
    "skip_tokenizer_init",
    "structured_outputs_config",
    "trust_remote_code",
)


MasksByRunning = Annotated[
    tuple[tuple[PositiveInt, NonNegativeInt], ...],
    Field(
        description="pairs (n, masks): with n or more requests running, each has so many masks; "
        "default: as many as pay, by the seconds of steps and the drafts accepted"
    ),
]


class VllmConfig(Config):
    """vLLM's engine in a replica (docs/how-to/vllm.md). `args` takes its other arguments."""

    type: Literal["vllm"] = "vllm"
    max_batch: int = Field(default=64, ge=1, description="vLLM's max_num_seqs")
    max_context: int | None = Field(
        default=None,
        ge=8,
        description="vLLM's max_model_len; default: the model's own, as far as memory holds it",
    )
    max_step_tokens: int = Field(
        default=2048, ge=8, description="rows of one forward: vLLM's max_num_batched_tokens"
    )
    cache_bytes: int | None = Field(
        default=None, ge=1, description="KV cache of each GPU: vLLM's kv_cache_memory_bytes"
    )
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="KV cache instead of cache_bytes, as vLLM counts it"
    )
    prefix_cache: bool = Field(default=True, description="vLLM's enable_prefix_caching")
    draft_adapter: AdapterPath | None = Field(
        default=None, description="a draft adapter for this model: directory, hub name or URI"
    )
    masks: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="masks of a request in a step; default: as many as the checkpoint or its "
        "adapter was trained for. A number leaves room for an adapter that comes later",
    )
    masks_by_running: MasksByRunning = ()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: str | None = Field(default=None, description="as vLLM names it, such as 'fp8'")
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs that share each layer")
    pipeline_parallel_size: int = Field(default=1, ge=1, description="groups of layers")
    py_executable: str | None = Field(
        default=None,
        description="Python with vLLM for the replicas' processes; default: the nodes' own",
    )
    args: dict[str, Any] = Field(
        default={}, description="more of vLLM's engine arguments, by the names of its EngineArgs"
    )

    @model_validator(mode="after")
    def _arguments_are_free(self) -> "VllmConfig":
        own = type(self).model_fields.keys() - {"args"}
        for name in self.args:
            if name in own:
                raise ValueError(f"args.{name}: it is a field of the engine: write engine.{name}")
            if name in _SAID_BY:
                raise ValueError(f"args.{name}: it is said by {_SAID_BY[name]}")
            if name in _UNUSED:
                raise ValueError(
                    f"args.{name}: no request of this service can name a LoRA, so it would have no "
                    "effect: merge the LoRA into the checkpoint, or use vLLM with the plug-in"
                )
            if name in _FIXED:
                raise ValueError(f"args.{name}: the service relies on its own value; leave it out")
        if "mars" in self.args.get("additional_config", {}):
            raise ValueError("args.additional_config.mars: it is said by the engine's own fields")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> "VllmConfig":
        if self.cache_bytes is not None and self.gpu_memory_utilization is not None:
            raise ValueError("cache_bytes and gpu_memory_utilization: set one of them")
        if self.pipeline_parallel_size > 1 and (self.draft_adapter or self.masks):
            raise ValueError(
                "drafts do not work with pipeline_parallel_size > 1: use tensor_parallel_size"
            )
        if self.max_step_tokens < self.max_batch:
            raise ValueError(
                f"max_step_tokens {self.max_step_tokens} is less than max_batch {self.max_batch}: "
                "each sequence needs a row of a step"
            )
        return self

    @property
    def step_tokens(self) -> int:
        """Most rows of one forward."""
        return self.max_step_tokens

    @property
    def workers(self) -> int:
        """Processes of one engine, with a GPU each if there are any."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def unsupported(self, mode: Mode) -> str | None:
        """Why this engine does not decode a mode, and what to use."""
        if isinstance(mode, ExactMode):
            return None
        if not isinstance(mode, VerifiedMode):
            return (
                f"the vLLM engine decodes 'exact' and 'verified', not {mode.type!r}: use one of "
                "them, or engine.type 'mars'"
            )
        given = [
            name for name in ("window", "groups", "branches") if getattr(mode, name) is not None
        ]
        if given:
            return (
                f"the vLLM engine chooses {' and '.join(given)} of 'verified' itself: leave it "
                "out, or use engine.type 'mars'"
            )
        return None

    def check_names(self, known: Iterable[str], version: str) -> None:
        """Raises ValueError for an argument in `args` that this version of vLLM does not have."""
        names = sorted(known)
        for name in self.args:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"engine.args.{name}: vLLM {version} has no such argument{hint}")


def _type_of(engine: Any) -> str:
    """The tag of a table or of a value; tables without a type are of this process's engine."""
    if isinstance(engine, Mapping):
        return str(engine.get("type", "mars"))
    return getattr(engine, "type", "mars")


# The engines that a service may have.
ServedEngine = Annotated[
    Annotated[EngineConfig, Tag("mars")] | Annotated[VllmConfig, Tag("vllm")],
    Discriminator(
        _type_of,
        custom_error_type="engine_type",
        custom_error_message="type must be 'mars' or 'vllm'",
    ),
]


class VllmMarsRequest(Config):
    """What a request may say: `SamplingParams(extra_args={"mars": {...}})`."""

    threshold: float | None = Field(
        default=None, ge=0, le=1, description="in place of the engine's; 1 is lossless"
    )
    budget: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="in place of a threshold: share of the answer's tokens that may differ from "
        "plain decoding",
    )
    floor: float = Field(
        default=0.0, ge=0, le=1, description="lowest of the engine's thresholds that it follows"
    )
    drafts: bool = Field(
        default=True, description="false: plain decoding, a token for each forward"
    )

    @model_validator(mode="after")
    def _one_rule(self) -> "VllmMarsRequest":
        if self.budget is not None and self.threshold is not None:
            raise ValueError("name threshold or budget: a budget finds its own threshold")
        return self


class VllmMars(Config):
    """MARS decoding by the plug-in: `vllm serve ... --additional-config '{"mars": {...}}'`."""

    adapter: AnyAdapterPath | None = Field(
        default=None, description="directory of a draft adapter; none for a model with mars.json"
    )
    adapters_change: bool = Field(
        default=False,
        description="adapters may come, change and go while the engine runs; not with CUDA "
        "graphs, which keep what they were recorded with",
    )
    masks_by_running: MasksByRunning = ()
    threshold: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="drafts are accepted down to this share of the likeliest token's probability; "
        "1 is lossless",
    )
