"""Decoding modes, sampling and the size of an engine."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mars_ray.config.base import Config

Threshold = Annotated[float, Field(ge=0, le=1)]
Window = Annotated[
    int | None, Field(ge=1, le=64, description="masks per step; default: trained depth")
]


class ExactMode(Config):
    """Plain autoregressive decoding: one token per forward."""

    type: Literal["exact"] = "exact"


class VerifiedMode(Config):
    """Drafts are verified by the next forward; at threshold 1 the output is that of `exact`."""

    type: Literal["verified"] = "verified"
    threshold: Threshold = 1.0
    window: Window = None
    groups: int | None = Field(
        default=None,
        ge=1,
        le=65,
        description="outcomes of a step that get masks, likeliest first; default: as many as pay",
    )
    branches: int | None = Field(
        default=None,
        ge=1,
        le=8,
        description="alternatives for a step's first draft, each with a chain of drafts behind it; "
        "default: as many as pay, and one where the threshold is fixed below 1",
    )


class ConfidenceMode(Config):
    """The paper's rule: commit proposals left to right while their confidence passes."""

    type: Literal["confidence"] = "confidence"
    threshold: Threshold = 0.95
    measure: Literal["probability", "margin", "entropy"] = "probability"
    window: Window = None


class BlockCachedMode(Config):
    """The paper's block-level cache: rows wait at block boundaries."""

    type: Literal["block_cached"] = "block_cached"
    threshold: Threshold = 0.95
    measure: Literal["probability", "margin", "entropy"] = "probability"
    cache_block: int = Field(default=4, ge=1, le=64, description="tokens per cache block")


class JacobiMode(Config):
    """Fixed-point decoding without masks (Santilli et al., 2023): the output is that of `exact`."""

    type: Literal["jacobi"] = "jacobi"
    guesses: int = Field(default=4, ge=1, le=64, description="tokens guessed ahead")


class SpeculativeMode(Config):
    """A draft model adds its tokens to those of the masks (paper, section 4.6).

    At threshold 1 the output is that of `exact`. With window 0 it is ordinary speculative decoding.
    """

    type: Literal["speculative"] = "speculative"
    threshold: Threshold = 1.0
    draft_tokens: int = Field(default=4, ge=1, le=64, description="of the draft model, per step")
    window: int | None = Field(
        default=None, ge=0, le=64, description="masks of a group; default: trained depth"
    )
    groups: int | None = Field(
        default=None, ge=1, le=129, description="outcomes that get masks; default: all"
    )


Mode = Annotated[
    ExactMode | VerifiedMode | ConfidenceMode | BlockCachedMode | JacobiMode | SpeculativeMode,
    Field(discriminator="type"),
]


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
        """Whether anything is done to the logits before a token is taken from them."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_new_tokens
        )


class EngineConfig(Config):
    """Size of one decoding engine."""

    max_batch: int = Field(default=16, ge=1, description="sequences decoded together")
    max_context: int = Field(default=1024, ge=8, description="prompt and answer, tokens")
    max_step_tokens: int = Field(
        default=512, ge=8, description="rows of one forward: long prompts are cut into chunks"
    )
    page_size: int = Field(default=16, ge=1, description="tokens of a page of the KV cache")
    cache_bytes: int | None = Field(
        default=None, ge=1, description="KV cache; default: max_batch sequences of max_context"
    )
    cache_memory_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="KV cache instead of cache_bytes: share of the device's memory that is free "
        "when the model is loaded",
    )
    prefix_cache: bool = Field(default=True, description="prompts share pages of equal beginnings")
    draft_model: str | None = Field(
        default=None, description="checkpoint with the same tokenizer, for mode speculative"
    )
    draft_adapter: str | None = Field(
        default=None,
        description="directory of a draft adapter for this model (`mars-ray adapt` makes one), or "
        "in a service a hub name or URI: its masks take the place of the checkpoint's own",
    )
    window_control: bool = Field(
        default=True,
        description="measure what steps cost, and give lossless requests the masks that pay",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="of several GPUs CUDA_VISIBLE_DEVICES chooses one"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="auto: the checkpoint's own; of 16 bits on a CPU bfloat16, or float32 where it "
        "does not multiply that",
    )
    attention_backend: Literal["auto", "dense", "triton"] = Field(
        default="auto", description="auto: on a GPU triton with CUDA graphs, else dense"
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads; default: torch's choice"
    )

    @model_validator(mode="after")
    def _one_size(self) -> "EngineConfig":
        if self.cache_bytes is not None and self.cache_memory_share is not None:
            raise ValueError("cache_bytes and cache_memory_share: set one of them")
        return self


def check_generation(modes: Iterable[Mode], max_new_tokens: int, engine: EngineConfig) -> None:
    """Raises ValueError if an engine of this size could not decode a single request."""
    if max_new_tokens >= engine.max_context:
        raise ValueError(
            f"max_new_tokens {max_new_tokens} leaves no room for a prompt in engine.max_context "
            f"{engine.max_context}: lower the one or raise the other"
        )
    if any(isinstance(mode, SpeculativeMode) for mode in modes) and not engine.draft_model:
        raise ValueError("mode speculative needs engine.draft_model: name one, or leave it out")
