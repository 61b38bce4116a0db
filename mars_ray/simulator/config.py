"""A job of `mars-ray simulate`: traces, policies, seeds, and the cluster they run on.

This module needs no numba, so a job can be checked where the simulator cannot run.
"""

import math
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from mars_ray.config.base import DISTINCT, Config, Names
from mars_ray.config.scaling import ScalingConfig, Slo


class _Source(Config):
    """Changes that any source allows: another rate, or a part of its time."""

    rate_factor: float = Field(
        default=1.0,
        gt=0,
        description="times as many requests: a rate that is known is multiplied; of a record "
        "sessions, or requests of its bursts, are drawn or left out",
    )
    spread_s: float = Field(
        default=0.0, ge=0, description="each arrival moves later by up to this, at random"
    )
    start_s: float = Field(default=0.0, ge=0, description="what comes before is left out")


class _Recorded(_Source):
    duration_s: float | None = Field(default=None, gt=0, description="default: to the end")
    resample: bool = Field(
        default=True,
        description="seeds other than 0 draw sessions, or bursts, from the record; without it "
        "every seed has the recorded ones",
    )


class FileTrace(_Recorded):
    """A CSV or JSONL file in the schema of docs/inside/simulator.md, optionally gzipped."""

    type: Literal["file"] = "file"
    path: Annotated[str, Names("file")]


class AzureTrace(_Recorded):
    """AzureLLMInferenceTrace_*.csv of github.com/Azure/AzurePublicDataset."""

    type: Literal["azure"] = "azure"
    path: Annotated[str, Names("file")]


class MooncakeTrace(_Recorded):
    """conversation_trace.jsonl of github.com/kvcache-ai/Mooncake (FAST25-release)."""

    type: Literal["mooncake"] = "mooncake"
    path: Annotated[str, Names("file")]
    spread_s: float = Field(
        default=3.0, ge=0, description="its times are multiples of 3 s, which nobody sent at"
    )


class ServeGenTrace(_Source):
    """Clients of github.com/alibaba/ServeGen, merged: rates by window, and token counts."""

    type: Literal["servegen"] = "servegen"
    rates_path: Annotated[str, Names("file")] = Field(
        description="client_id, window_start_s, rate_rps, cv, pattern, ..."
    )
    lengths_path: Annotated[str, Names("file")] = Field(
        description="JSONL: client_id, window_s, input_ and output_tokens"
    )
    duration_s: float = Field(default=3600, gt=0)
    window_s: float = Field(default=600, gt=0, description="over which a client's rate holds")
    resample: bool = Field(
        default=True,
        description="seeds other than 0 draw clients; without it every seed has all of them",
    )


class Lengths(Config):
    """Token counts of generated requests: log-normal, cut at the limit."""

    prompt_mean: float = Field(default=512, ge=1)
    output_mean: float = Field(default=256, ge=1)
    cv: float = Field(default=1.0, ge=0, description="standard deviation over mean; 0: constant")
    limit: int = Field(default=8192, ge=1)


class RampTrace(_Source):
    """Poisson arrivals in stages of different rates; the defaults are llm-d's benchmark.

    It has stages of 2, 4, 6, 8, 10, 4, 1 requests/s over 42 minutes, with 4,000 tokens in and 1,000
    out (github.com/llm-d/llm-d-autoscaling, docs/developer-guide/epp-saturation-benchmark.md).
    """

    duration_s: float | None = Field(default=None, gt=0, description="default: to the end")
    type: Literal["ramp"] = "ramp"
    rates_rps: tuple[NonNegativeFloat, ...] = Field(default=(2, 4, 6, 8, 10, 4, 1), min_length=1)
    stage_s: float = Field(default=360, gt=0)
    lengths: Lengths = Lengths(prompt_mean=4000, output_mean=1000, cv=0)


class FlashTrace(_Source):
    """A steady rate that jumps to another rate for a while."""

    type: Literal["flash"] = "flash"
    base_rps: float = Field(default=2, gt=0)
    peak_rps: float = Field(default=10, gt=0)
    lengths: Lengths = Lengths()
    from_s: float = Field(default=600, ge=0)
    to_s: float = Field(default=900, ge=0)
    duration_s: float = Field(default=1800, gt=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.from_s < self.to_s <= self.duration_s:
            raise ValueError("from_s < to_s <= duration_s must hold")
        return self


class SineTrace(_Source):
    """The rise and fall of a day's load, compressed to `period_s`."""

    type: Literal["sine"] = "sine"
    low_rps: float = Field(default=1, gt=0)
    high_rps: float = Field(default=8, gt=0)
    lengths: Lengths = Lengths()
    period_s: float = Field(default=7200, gt=0)
    duration_s: float = Field(default=7200, gt=0)


TraceSource = Annotated[
    FileTrace | AzureTrace | MooncakeTrace | ServeGenTrace | RampTrace | FlashTrace | SineTrace,
    Field(discriminator="type"),
]


# Ours; a fleet that stays; Ray Serve's default. `-verified`: with the model's lossless masks, where
# the others decode plainly.
PolicyName = Literal["mars", "fixed", "fixed-verified", "ray", "ray-verified"]
ALL_POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


class Kill(Config):
    """Replicas that die at once, chosen at random."""

    at_s: float = Field(ge=0)
    replicas: int = Field(default=1, ge=1)


class Slowdown(Config):
    """All machines become slower, or faster, until the next slowdown."""

    at_s: float = Field(ge=0)
    slowness: float = Field(gt=0, description="times what a step takes by `Cluster.slowness`")


class Cluster(Config):
    """The cluster's properties, which policies cannot choose."""

    cold_start_s: float = Field(default=100.0, ge=0, description="until a new replica answers")
    first_cold_starts_s: tuple[NonNegativeFloat, ...] = Field(
        default=(), description="of the first replicas that are ordered, where each is known"
    )
    tick_s: float = Field(default=1.0, gt=0, description="between two calls of the policy")
    metrics_lag_s: float = Field(default=1.0, ge=0, description="age of what the policy sees")
    latency_window_s: float = Field(
        default=30.0, gt=0, description="over which percentiles of latencies are taken"
    )
    routing: Literal["prefix", "two-choices", "least-outstanding"] = Field(
        default="prefix",
        description="prefix is ours: two-choices, Ray Serve's, except where a replica was sent the "
        "same beginning",
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
    step_tokens: int | None = Field(
        default=None,
        ge=8,
        description="rows of a full step; default: chosen for the time per token owed",
    )
    retries: int = Field(default=1, ge=0, description="of a request whose replica died")
    kills: tuple[Kill, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()


class PerTrace(Config):
    """What is different in the cells of one trace."""

    kills: tuple[Kill, ...] = ()
    tick_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="default: cluster.tick_s; a long trace may tick less often"
    )
    seeds: Annotated[tuple[NonNegativeInt, ...], DISTINCT] = Field(
        default=(), description="default: the job's seeds; fewer where a run takes long"
    )


class Simulation(Config):
    """Cells, each with every seed. A cell is a trace, a regime (what is owed to a request) and a
    cold start."""

    kind: Literal["simulate"] = "simulate"
    name: str
    service_model: Annotated[str, Names("service model")] = Field(
        description="JSON file (docs/how-to/capacity-and-cost.md)"
    )
    accuracy: float = Field(default=100.0, gt=0, le=100, description="of lossless answers, percent")
    traces: dict[str, TraceSource] = Field(min_length=1)
    slos: dict[str, Slo] = Field(min_length=1, description="regimes by name")
    cold_starts_s: Annotated[tuple[NonNegativeFloat, ...], DISTINCT] = Field(
        default=(), description="default: cluster.cold_start_s alone"
    )
    scaling: ScalingConfig = Field(
        default=ScalingConfig(), description="slo and cold_start_s are those of the cell"
    )
    cluster: Cluster = Cluster()
    per_trace: dict[str, PerTrace] = Field(default={}, description="by the trace's name")
    seeds: Annotated[tuple[NonNegativeInt, ...], DISTINCT] = Field(
        default=(0, 1, 2, 3, 4), min_length=1
    )

    @property
    def colds_s(self) -> tuple[float, ...]:
        """The cold starts of the cells."""
        return self.cold_starts_s or (self.cluster.cold_start_s,)

    def seeds_of(self, trace: str) -> tuple[int, ...]:
        special = self.per_trace.get(trace)
        return (special.seeds if special else ()) or self.seeds

    def cluster_of(self, trace: str, cold_start_s: float) -> Cluster:
        changes: dict[str, Any] = {"cold_start_s": cold_start_s}
        if special := self.per_trace.get(trace):
            changes["kills"] = (*self.cluster.kills, *special.kills)
            changes["tick_s"] = special.tick_s or self.cluster.tick_s
        return self.cluster.model_copy(update=changes)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.scaling.quality_classes:
            raise ValueError(
                "no request of a trace has a class: leave scaling.quality_classes out, and give "
                "requests a pinned_threshold in the trace"
            )
        if self.scaling.slo != Slo():
            raise ValueError("leave scaling.slo out, and name the regimes in slos")
        for name in self.per_trace:
            if name not in self.traces:
                raise ValueError(f"per_trace.{name}: traces has no {name}")
        for trace in self.traces:
            cluster = self.cluster_of(trace, 0)
            tick_s = cluster.tick_s
            age_s = max(1, math.ceil(cluster.metrics_lag_s / tick_s)) * tick_s
            if age_s > self.scaling.stale_after_s:
                raise ValueError(
                    f"with cluster.tick_s and metrics_lag_s metrics of {trace} are {age_s:g} s "
                    f"old, and scaling.stale_after_s={self.scaling.stale_after_s:g} has policies "
                    "ignore them: raise it, or lower those"
                )
        if len({f"{cold:g}" for cold in self.colds_s}) < len(self.colds_s):
            raise ValueError("cold starts must differ in their first six digits")
        return self


class SimulateJob(Simulation):
    """A simulation of every policy, with what it ships with."""

    policies: Annotated[tuple[PolicyName, ...], DISTINCT] = Field(
        default=ALL_POLICIES, min_length=1
    )


# Job kinds in the form that `load_job` needs.
KINDS: dict[str, type[Config]] = {"simulate": SimulateJob}
