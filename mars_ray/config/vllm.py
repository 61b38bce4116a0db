"""What vLLM's `additional_config` and a request's `extra_args` may say, under the key `mars`."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from mars_ray.config.base import Config


class VllmMarsRequest(Config):
    """What a request may say: `SamplingParams(extra_args={"mars": {...}})`."""

    threshold: Annotated[
        float | None,
        Field(ge=0, le=1, description="in place of the engine's; 1 is lossless"),
    ] = None


class VllmMars(Config):
    """MARS decoding by the plug-in: `vllm serve ... --additional-config '{"mars": {...}}'`."""

    adapter: Annotated[
        str | None,
        Field(description="directory of a draft adapter; none for a model with mars.json"),
    ] = None
    masks_by_running: Annotated[
        tuple[tuple[PositiveInt, NonNegativeInt], ...],
        Field(
            description="pairs (n, masks): with n or more requests running, each has so many masks"
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
