"""Decoding modes, sampling and the size of an engine."""

from typing import Annotated, Literal

from pydantic import Field

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


Mode = Annotated[
    ExactMode | VerifiedMode | ConfidenceMode | BlockCachedMode, Field(discriminator="type")
]


class Sampling(Config):
    """How a token is chosen from a row's logits; temperature 0 is greedy."""

    temperature: float = Field(default=0.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0: no limit")
    seed: int = 0


class EngineConfig(Config):
    """Size of one decoding engine."""

    max_batch: int = Field(default=16, ge=1, description="sequences decoded together")
    max_context: int = Field(default=1024, ge=8, description="prompt and answer, tokens")
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads; default: torch's choice"
    )
