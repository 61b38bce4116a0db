"""One service: a checkpoint behind an OpenAI-compatible API."""

from typing import Literal

from pydantic import Field, model_validator

from mars_ray.config.base import Config
from mars_ray.config.decode import EngineConfig, Mode, Threshold, VerifiedMode


class Limits(Config):
    """What one request may ask for; more is refused with a 400, 408, 413 or 429."""

    body_bytes: int = Field(default=1_000_000, ge=1_000)
    body_s: float = Field(default=30.0, gt=0, description="for the whole body to arrive; then 408")
    new_tokens: int = Field(default=1024, ge=1)
    waiting_requests: int = Field(default=256, ge=1, description="per replica; above: 429")
    choices: int = Field(default=16, ge=1, description="answers that one request may ask for")


class ServeJob(Config):
    """Binds to loopback unless told otherwise."""

    kind: Literal["serve"] = "serve"
    checkpoint: str
    model_name: str | None = Field(
        default=None, description="default: the checkpoint directory's name"
    )
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    replicas: int = Field(default=1, ge=1)
    cpus_per_replica: float = Field(default=1, ge=0)
    gpus_per_replica: float = Field(default=0, ge=0)
    keys_file: str | None = Field(
        default=None, description="TOML with API keys (docs/serving.md); default: nobody is asked"
    )
    stream_interval_s: float = Field(
        default=0.02, ge=0, description="at least so long between two messages of a stream"
    )
    default_mode: Mode = VerifiedMode()
    qualities: dict[str, Threshold] = Field(
        default={"lossless": 1.0, "balanced": 0.3, "fast": 0.0},
        description="the classes that requests may name, and the lowest threshold each tolerates",
    )
    default_quality: str = Field(
        default="lossless", description="of requests that pin no mode, threshold or quality"
    )
    engine: EngineConfig = EngineConfig()
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _default_exists(self) -> "ServeJob":
        if self.default_quality not in self.qualities:
            raise ValueError(f"default_quality {self.default_quality!r} is not among qualities")
        return self
