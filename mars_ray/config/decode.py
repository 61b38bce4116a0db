"""Settings of sampling, and of an engine's size."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mars_ray.config.base import AdapterPath, Config
from mars_ray.config.modes import Mode

# While a prompt waits, one row of a step in this many is kept for prompts.
PROMPTS_SHARE = 8


class Sampling(Config):
    """How a token is chosen from a row's logits; temperature 0 is greedy."""

    temperature: float = Field(default=0.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0: no limit")
    min_p: float = Field(default=0.0, ge=0, le=1, description="share of the likeliest token's p")
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    repetition_penalty: float = Field(default=1.0, ge=0.01, description="on prompt and answer")
    presence_penalty: float = Field(default=0.0, ge=-2, le=2, description="on the answer")
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2, description="on the answer")
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default={})
    min_new_tokens: int = Field(default=0, ge=0, description="no stop token before so many")

    @property
    def changes_logits(self) -> bool:
        """Whether the logits are modified before a token is chosen from them."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_new_tokens
        )


# Rows of a forward where nobody says for how long it may take.
_STEP_TOKENS = 512


class EngineConfig(Config):
    """Size of one decoding engine."""

    type: Literal["mars"] = "mars"
    max_batch: int = Field(default=16, ge=1, description="sequences decoded together")
    max_context: int | None = Field(
        default=None,
        ge=8,
        description="prompt and answer, tokens; default: as many as the model was made for, as far "
        "as a part of the free memory holds them",
    )
    max_step_tokens: int | None = Field(
        default=None,
        ge=8,
        description="rows of one forward: long prompts are cut into chunks; default: in a service "
        "as many as `scaling.slo.time_per_token_s` allows, elsewhere 512",
    )
    page_size: int = Field(default=16, ge=1, description="tokens of a page of the KV cache")
    cache_bytes: int | None = Field(
        default=None,
        ge=1,
        description="KV cache; default: max_batch sequences of max_context, as far as there is "
        "memory",
    )
    cache_memory_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="KV cache instead of cache_bytes: share of the device's memory that is free "
        "when the model is loaded",
    )
    prefix_cache: bool = Field(default=True, description="prompts share pages of equal beginnings")
    draft_adapter: AdapterPath | None = Field(
        default=None,
        description="directory of a draft adapter for this model (`mars-ray adapt` makes one), or "
        "in a service a hub name or URI: its masks take the place of the checkpoint's own",
    )
    window_control: bool = Field(
        default=True,
        description="measure what steps cost, and give lossless requests the masks that pay",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="CUDA_VISIBLE_DEVICES chooses one of several GPUs"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="auto: the checkpoint's own; of 16 bits on a CPU bfloat16, or float32 where it "
        "does not multiply that",
    )
    attention_backend: Literal["auto", "compiled", "dense", "triton"] = Field(
        default="auto",
        description="auto: on a GPU triton with CUDA graphs, on a CPU a compiled step, else dense",
    )
    cpu_instructions: Literal["auto", "amx", "avx512_bf16", "avx512f", "avx2"] = Field(
        default="auto",
        description="instruction set of the compiled step, by default the best that the processor "
        "has; replicas on different processors give the same answers if all have the same one",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="of the compiled step; default: a replica's whole CPUs, elsewhere all",
    )

    @property
    def step_tokens(self) -> int:
        """Most rows of one forward."""
        return self.max_step_tokens or _STEP_TOKENS

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer, of a configuration that has been `sized` for a model
        (`decode/kv_cache.py`)."""
        assert self.max_context is not None, "the context depends on the model"
        return self.max_context

    @property
    def workers(self) -> int:
        """Processes of one engine, with a GPU each if there are any."""
        return 1

    @property
    def pipeline_parallel_size(self) -> int:
        """Groups of layers on workers of their own."""
        return 1

    def unsupported(self, mode: Mode) -> str | None:
        """None: this engine decodes every mode."""
        return None

    @model_validator(mode="after")
    def _one_size(self) -> "EngineConfig":
        if self.cache_bytes is not None and self.cache_memory_share is not None:
            raise ValueError("cache_bytes and cache_memory_share: set one of them")
        return self


def check_generation(max_new_tokens: int, engine: EngineConfig) -> None:
    """Raises ValueError if an engine of this size could not decode a single request."""
    if engine.max_context is not None and max_new_tokens >= engine.max_context:
        raise ValueError(
            f"max_new_tokens {max_new_tokens} leaves no room for a prompt in engine.max_context "
            f"{engine.max_context}: lower the one or raise the other"
        )
