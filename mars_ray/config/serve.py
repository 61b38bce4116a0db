"""One service: a checkpoint behind an OpenAI-compatible API."""

from typing import Literal

from pydantic import Field

from mars_ray.config.base import Config
from mars_ray.config.decode import EngineConfig, Mode, VerifiedMode


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
    default_mode: Mode = VerifiedMode()
    engine: EngineConfig = EngineConfig()
    limits: Limits = Limits()
