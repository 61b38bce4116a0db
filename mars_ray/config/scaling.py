"""An operator's targets and limits for a fleet, and what `mars-ray advise` is asked about one."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mars_ray.config.base import DISTINCT, Config, Names
from mars_ray.config.modes import Threshold


class Slo(Config):
    """The times promised to a request; one that misses either counts as missed."""

    ttft_s: float = Field(default=2.0, gt=0, description="until the first token")
    time_per_token_s: float = Field(default=0.1, gt=0, description="mean over the rest")
    attainment: float = Field(default=0.99, gt=0, lt=1, description="share of requests within both")


class ThresholdBounds(Config):
    """Bounds of the threshold, where 1 is lossless: in `confidence` plain decoding.

    At rest it is the set-point. Nothing goes above that but requests that say so, or below the
    floor.
    """

    set_point: Threshold = 1.0
    floor: Threshold = 0.3

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.floor > self.set_point:
            raise ValueError("must be floor <= set_point")
        return self


_LEARNT = "the policy learns from latencies how much of a replica can be used"


class ScalingConfig(Config):
    """Replicas and threshold of one fleet (docs/reference/autoscaling.md)."""

    gone: ClassVar[Mapping[str, str]] = {
        "aim": _LEARNT,
        "caution": _LEARNT,
        "prices": "`slo.attainment` says what is owed, `quality_budget_points` what may be lost",
        "budget_window_s": "`quality_budget_points` is a mean over an hour",
        "scale_down_window_s": "it follows the cold start",
        "lower_dwell_s": "the threshold falls as soon as it has to",
        "raise_dwell_s": "the threshold rises once a higher one has been enough for 15 s",
    }

    target_ongoing_requests: float | None = Field(
        default=None,
        gt=0,
        description="with it Ray Serve's own rule decides: a replica for so many requests; the "
        "threshold stays at its set-point",
    )
    slo: Slo = Slo()
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=4, ge=1)
    scale_to_zero: bool = Field(default=False, description="after idle_to_zero_s")
    threshold: ThresholdBounds = ThresholdBounds()
    quality_classes: dict[str, Threshold] = Field(
        default={}, description="the simulator's classes and floors; a service has `qualities`"
    )
    quality_budget_points: float | None = Field(
        default=1.0,
        ge=0,
        description="mean points lost below the set-point over an hour; beyond it the set-point "
        "holds",
    )
    cold_start_s: float = Field(default=60.0, gt=0, description="until it has been measured")
    idle_to_zero_s: float = Field(default=600.0, ge=0, description="without a request")
    stale_after_s: float = Field(default=15.0, gt=0, description="older metrics: nothing changes")

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas must be at most max_replicas")
        return self


class AdviseJob(Config):
    """Advice from a trace or a Prometheus server, for one service model."""

    kind: Literal["advise"] = "advise"
    source: Annotated[str, Names("file")] = Field(
        description="trace file of docs/inside/simulator.md, or http(s) URL of Prometheus"
    )
    service_model: Annotated[str, Names("service model")] = Field(
        description="JSON file (docs/how-to/capacity-and-cost.md)"
    )
    slos: Annotated[tuple[Slo, ...], DISTINCT] = Field(
        default=(), description="default: three around what the model can do"
    )
    hours: float | None = Field(
        default=None, gt=0, le=168, description="the first of a trace, the last of Prometheus"
    )
    model_name: str | None = Field(default=None, description="where Prometheus has several")
    threshold: Threshold | None = Field(
        default=None, description="the lower one to judge; default: at the floor of a service"
    )
    cold_start_s: float = Field(default=100.0, ge=0)
    max_replicas: int = Field(default=64, ge=1, description="no larger fleet is tried")
