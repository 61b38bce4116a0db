"""A simulated comparison: traces, policies, seeds, and the cluster they run on."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from mars_ray.config.base import DISTINCT, Config
from mars_ray.config.scaling import ScalingConfig
from mars_ray.config.traces import TraceSource

PolicyName = Literal[
    "mars",
    "lossless",
    "fixed-threshold",
    "threshold-only",
    "static-peak",
    "static-mean",
    "ray",
    "ray-verified",
    "ray-ttft",
    "knative",
    "llm-d",
    "clairvoyant",
]
ALL_POLICIES: tuple[PolicyName, ...] = (
    "mars",
    "lossless",
    "fixed-threshold",
    "threshold-only",
    "static-peak",
    "static-mean",
    "ray",
    "ray-verified",
    "ray-ttft",
    "knative",
    "llm-d",
    "clairvoyant",
)


class Kill(Config):
    """Replicas that die at once, whichever."""

    at_s: float = Field(ge=0)
    replicas: int = Field(default=1, ge=1)


class Slowdown(Config):
    """All machines are slower, or faster, until the next one."""

    at_s: float = Field(ge=0)
    slowness: float = Field(gt=0, description="times what a step takes by `Cluster.slowness`")


class Cluster(Config):
    """What is not the policy's to choose."""

    cold_start_s: float = Field(default=100.0, ge=0, description="until a new replica answers")
    first_cold_starts_s: tuple[NonNegativeFloat, ...] = Field(
        default=(), description="of the first replicas that are ordered, where each is known"
    )
    tick_s: float = Field(default=1.0, gt=0, description="between two calls of the policy")
    metrics_lag_s: float = Field(default=1.0, ge=0, description="age of what the policy sees")
    latency_window_s: float = Field(
        default=30.0, gt=0, description="over which percentiles of latencies are taken"
    )
    routing: Literal["two-choices", "least-outstanding"] = Field(
        default="two-choices", description="the first is Ray Serve's"
    )
    waiting_requests: int = Field(default=256, ge=1, description="per replica; above: 429")
    overhead_s: float = Field(
        default=0.0,
        ge=0,
        description="in every first token, beside the engine: HTTP, routing, processes on the way",
    )
    slowness: float = Field(
        default=1.0, gt=0, description="of the engines: times what the service model says of a step"
    )
    step_tokens: int = Field(default=2048, ge=1, description="rows of a step")
    retries: int = Field(default=1, ge=0, description="of a request whose replica died")
    kills: tuple[Kill, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()


class SimulateJob(Config):
    """Every policy on every trace with every seed."""

    kind: Literal["simulate"] = "simulate"
    name: str
    service_model: str = Field(description="JSON file (docs/simulator.md)")
    accuracy: float = Field(default=100.0, gt=0, le=100, description="of lossless answers, percent")
    traces: dict[str, TraceSource] = Field(min_length=1)
    policies: Annotated[tuple[PolicyName, ...], DISTINCT] = Field(
        default=ALL_POLICIES, min_length=1
    )
    scaling: ScalingConfig = ScalingConfig()
    cluster: Cluster = Cluster()
    fixed_threshold: float = Field(
        default=0.9, ge=0, le=1, description="of the policy fixed-threshold"
    )
    seeds: Annotated[tuple[NonNegativeInt, ...], DISTINCT] = Field(
        default=(0, 1, 2, 3, 4), min_length=1
    )
    tuning_seeds: int = Field(
        default=2, ge=1, description="policies are tuned on so many of the seeds, the first ones"
    )
    cold_starts_s: Annotated[tuple[NonNegativeFloat, ...], DISTINCT] = Field(
        default=(), description="other cold starts, for the sensitivity; all policies again"
    )

    @model_validator(mode="after")
    def _classes_are_a_services(self) -> Self:
        if self.scaling.quality_classes:
            raise ValueError(
                "no request of a trace has a class: leave scaling.quality_classes out, and give "
                "requests a pinned_threshold in the trace"
            )
        return self

    @model_validator(mode="after")
    def _metrics_are_fresh(self) -> Self:
        tick_s = self.cluster.tick_s
        age_s = max(1, math.ceil(self.cluster.metrics_lag_s / tick_s)) * tick_s
        if age_s > self.scaling.stale_after_s:
            raise ValueError(
                f"with cluster.tick_s and metrics_lag_s metrics are {age_s:g} s old, and "
                f"scaling.stale_after_s={self.scaling.stale_after_s:g} has policies ignore them: "
                "raise it, or lower those"
            )
        return self

    @model_validator(mode="after")
    def _cold_starts_have_names(self) -> Self:
        colds = {self.cluster.cold_start_s, *self.cold_starts_s}
        if len({f"{cold:g}" for cold in colds}) < len(colds):
            raise ValueError("cold starts must differ in their first six digits")
        return self
