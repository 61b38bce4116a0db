"""What vLLM's `additional_config` and a request's `extra_args` may say, under the key `mars`."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from mars_ray.config.base import Config


class VllmMarsRequest(Config):
    """What a request may say: `SamplingParams(extra_args={"mars": {...}})`."""

    threshold: Annotated[
        float | None,
        Field(ge=0, le=1, description="in place of the engine's; 1 is lossless"),
    ] = None
    budget: Annotated[
        float | None,
        Field(
            ge=0,
            le=1,
            description="in place of a threshold: share of the answer's tokens that may differ "
            "from plain decoding",
        ),
    ] = None
    floor: Annotated[
        float, Field(ge=0, le=1, description="lowest of the engine's thresholds that it follows")
    ] = 0.0
    drafts: Annotated[
        bool, Field(description="false: plain decoding, a token for each forward")
    ] = True

    @model_validator(mode="after")
    def _one_rule(self) -> "VllmMarsRequest":
        if self.budget is not None and self.threshold is not None:
            raise ValueError("name threshold or budget: a budget finds its own threshold")
        return self


class VllmMars(Config):
    """MARS decoding by the plug-in: `vllm serve ... --additional-config '{"mars": {...}}'`."""

    adapter: Annotated[
        str | None,
        Field(description="directory of a draft adapter; none for a model with mars.json"),
    ] = None
    adapters_change: Annotated[
        bool,
        Field(
            description="adapters may come, change and go while the engine runs; not with CUDA "
            "graphs, which keep what they were recorded with"
        ),
    ] = False
    masks_by_running: Annotated[
        tuple[tuple[PositiveInt, NonNegativeInt], ...],
        Field(
            description="pairs (n, masks): with n or more requests running, each has so many masks;"
            " default: as many as pay, by the seconds of steps and the drafts accepted"
        ),
    ] = ()
    threshold: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="drafts are accepted down to this share of the likeliest token's"
            " probability; 1 is lossless",
        ),
    ] = 1.0
