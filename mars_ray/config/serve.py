"""One service: checkpoints behind an OpenAI-compatible API; and the export of one to where services
load it."""

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from mars_ray.config.base import MODEL_CACHE, Checkpoint, Config, Names, Revision
from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import Mode, Threshold, VerifiedMode
from mars_ray.config.scaling import ScalingConfig
from mars_ray.config.vllm import ServedEngine

# Names of vLLM's options; its llama3_json is called llama3 here.
ToolParser = Literal["hermes", "llama3", "mistral"]
ReasoningParser = Literal["deepseek_r1", "qwen3"]


class Limits(Config):
    """Limits of one request; more is refused with a 400, 408, 413 or 429."""

    body_bytes: int = Field(default=1_000_000, ge=1_000)
    body_s: float = Field(default=30.0, gt=0, description="time to send the whole body; then 408")
    new_tokens: int = Field(default=1024, ge=1)
    beyond_new_tokens: Literal["cut", "refuse"] = Field(
        default="cut",
        description="what becomes of a request that asks for more: its answer is cut there, as "
        "the header X-New-Tokens-Limit says, or it is refused",
    )
    waiting_requests: int = Field(default=256, ge=1, description="per replica; above: 429")
    choices: int = Field(default=16, ge=1, description="answers that one request may ask for")
    request_s: float = Field(
        default=600, gt=0, description="for a request, waiting included; its timeout_s may be less"
    )
    slow_reader_s: float = Field(
        default=30, gt=0, description="without the client reading anything of a stream"
    )


class ServedModel(Config):
    """A model of a service and the replicas that run it."""

    checkpoint: Checkpoint
    revision: Revision = None
    model_name: str | None = Field(
        default=None,
        description="name in requests; default: last part of the checkpoint's name",
    )
    replicas: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="auto: as `scaling` says"
    )
    scaling: ScalingConfig = Field(
        default=ScalingConfig(),
        description="how replicas and threshold scale (docs/reference/autoscaling.md)",
    )
    service_model: Annotated[str | None, Names("service model")] = Field(
        default=None, description="for `scaling`; default: the checkpoint's frontier, and live"
    )
    max_replicas_per_node: int | None = Field(default=None, ge=1, le=100)
    cpus_per_replica: float = Field(default=1, ge=0)
    gpus_per_replica: float | None = Field(
        default=None,
        ge=0,
        description="default: one, or as many as the engine has workers, where the cluster has any "
        "and engine.device may; 0: on CPUs",
    )
    resources_per_replica: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="Ray's custom resources, such as an accelerator type"
    )
    environment: dict[str, str] = Field(
        default={}, description="environment variables of the replicas' processes"
    )
    router: Literal["prefix", "power_of_two"] = Field(
        default="prefix", description="prefix: prefer the replica that holds the prompt's beginning"
    )
    stream_interval_s: float = Field(
        default=0.05, ge=0, description="at least so long between two messages of a stream"
    )
    # A step may prefill a full batch of long prompts, which can take a large model on CPUs a while.
    step_timeout_s: float = Field(
        default=60,
        gt=0,
        le=1e6,
        description="a replica whose engine has work and finishes no step for so long, or whose "
        "process does not react, counts as hung: it writes its stacks into its log and is replaced",
    )
    default_mode: Mode | None = Field(
        default=None,
        description="mode of requests that name none; default: `verified` if the model drafts, "
        "else `exact`. The threshold of `verified`, and of `confidence` by probability, "
        "is then that of default_quality and of the set-point, and the one here for those who name "
        "the mode",
    )
    qualities: dict[str, Threshold] = Field(
        default={"lossless": 1.0, "balanced": 0.3, "fast": 0.0},
        description="the classes that requests may name, and the lowest threshold each tolerates",
    )
    default_quality: str = Field(
        default="lossless", description="class of requests that pin no mode, threshold or quality"
    )
    tool_parser: ToolParser | None = Field(
        default=None,
        description="how the model writes calls of tools; default: as its chat template does",
    )
    reasoning_parser: ReasoningParser | None = Field(
        default=None,
        description="tells thoughts from the answer: `deepseek_r1` where an answer begins with "
        "them, `qwen3` where it may begin with <think>; default: thoughts are part of the answer",
    )
    engine: ServedEngine = Field(
        default=EngineConfig(), description='the embedded one, or with `type = "vllm"` vLLM\'s'
    )

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        if self.default_quality not in self.qualities:
            classes = ", ".join(self.qualities)
            raise ValueError(f"default_quality {self.default_quality!r} is none of {classes}")
        scaling, gpus, workers = self.scaling, self.gpus_per_replica, self.engine.workers
        if scaling.quality_classes:
            raise ValueError("a service's classes are its `qualities`: leave quality_classes out")
        if self.replicas != "auto":
            # A resolved job has all fields, and must remain loadable.
            if scaling != ScalingConfig(threshold=scaling.threshold, slo=scaling.slo):
                raise ValueError(
                    "with a fixed number of replicas, only `scaling.threshold` and `scaling.slo` "
                    "have an effect"
                )
        elif not self.has_policy:
            taken = {"target_ongoing_requests", "min_replicas", "max_replicas", "scale_to_zero"}
            taken |= {"idle_to_zero_s", "threshold", "slo"}
            if scaling != ScalingConfig(**{key: getattr(scaling, key) for key in taken}):
                raise ValueError(
                    "with scaling.target_ongoing_requests Ray Serve decides, and of `scaling` only "
                    f"{', '.join(sorted(taken))} have an effect"
                )
        if self.service_model and not self.has_policy:
            raise ValueError("`service_model` has no effect where our policy does not decide")
        if self.default_mode and (problem := self.engine.unsupported(self.default_mode)):
            raise ValueError(f"default_mode: {problem}")
        if workers > 1 and gpus not in (None, 0, workers):
            raise ValueError(
                f"gpus_per_replica {gpus:g}: the engine's {workers} workers need a GPU each, so "
                f"write {workers}, or 0 to run on CPUs"
            )
        if workers > 1 and gpus and self.max_replicas_per_node:
            raise ValueError(
                "max_replicas_per_node has no effect on replicas of several GPUs, which Ray places "
                "as a group: leave it out"
            )
        device = self.engine.device if isinstance(self.engine, EngineConfig) else "auto"
        if device == "cpu" and gpus:
            raise ValueError("gpus_per_replica has no effect with engine.device 'cpu'")
        if device == "cuda" and gpus == 0:
            raise ValueError("gpus_per_replica 0 leaves no GPU for engine.device 'cuda'")
        return self

    @property
    def mode(self) -> Mode:
        """Mode of requests that name none, if there are drafts."""
        return self.default_mode or VerifiedMode()

    @property
    def set_point(self) -> Threshold:
        """The threshold at rest, for requests whose quality tolerates it."""
        return self.scaling.threshold.set_point

    @property
    def has_policy(self) -> bool:
        """Whether our policy decides replicas and threshold."""
        return self.replicas == "auto" and self.scaling.target_ongoing_requests is None

    @property
    def most_replicas(self) -> int:
        return self.scaling.max_replicas if self.replicas == "auto" else self.replicas

    @property
    def name(self) -> str:
        """The model's name in requests."""
        place = self.checkpoint
        if "://" in place:
            # User and options may be secrets, so they are not part of the name.
            parts = urlsplit(place)
            place = parts.path.strip("/") or parts.netloc.rpartition("@")[2]
        return self.model_name or place.rstrip("/").rsplit("/", 1)[-1]

    @property
    def deployment(self) -> str:
        """Name of the model's Serve deployment, which is also part of file names."""
        return "Replica-" + re.sub(r"[^\w.-]", "-", self.name)


class ServeJob(ServedModel):
    """Its own fields describe the first model. Binds to loopback unless told otherwise."""

    kind: Literal["serve"] = "serve"
    more_models: tuple[ServedModel, ...] = Field(
        default=(), description="further models; nothing is taken over from the first"
    )
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    ingress_replicas: int = Field(
        default=1, ge=1, description="processes that speak HTTP; one serves several engines"
    )
    keys_file: Annotated[str | None, Names("file")] = Field(
        default=None,
        description="TOML with API keys (docs/how-to/serve.md); default: nobody is asked",
    )
    allowed_origins: tuple[str, ...] = Field(
        default=(),
        description="origins of web pages whose scripts may ask the service; `*` for any",
    )
    request_log: str | None = Field(
        default=None, description="file for a line of JSON per request; default: standard output"
    )
    log_prompts: bool = Field(default=False, description="have the prompts in these lines")
    drain_s: float = Field(
        default=60, ge=0, description="time for accepted requests to finish when a process ends"
    )
    update_surge_percent: int = Field(
        default=100,
        ge=0,
        le=100,
        description="replicas that an update may start before it stops as many old ones; 0 on a "
        "cluster without room for more",
    )
    model_cache: str = Field(
        default=MODEL_CACHE,
        description="where each node keeps its copies of checkpoints from object stores",
    )
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [model.deployment for model in (self, *self.more_models)]
        for name in names:
            if names.count(name) > 1:
                shown = name.removeprefix("Replica-")
                raise ValueError(f"two models are named {shown!r}: give each a model_name")
        return self

    @model_validator(mode="after")
    def _rays_rule_can_add_replicas(self) -> Self:
        for model in (self, *self.more_models):
            target = model.scaling.target_ongoing_requests
            admitted = model.engine.max_batch + self.limits.waiting_requests
            if target is not None and target >= admitted:
                raise ValueError(
                    f"scaling.target_ongoing_requests {target:g} is never exceeded: a replica "
                    f"admits {admitted} requests (engine.max_batch and limits.waiting_requests)"
                )
        return self

    def each(self) -> dict[str, Self]:
        """For each model's name, the job with that model alone."""
        only = {
            model.name: self.model_copy(update=dict(model) | {"more_models": ()})
            for model in self.more_models
        }
        return {self.name: self.model_copy(update={"more_models": ()})} | only


class ExportJob(Config):
    """Copies a checkpoint with its card; a place that holds something already is refused."""

    kind: Literal["export"] = "export"
    checkpoint: Checkpoint
    revision: Revision = None
    destination: str = Field(
        description="directory or URI, another one for every version of a model"
    )
    model_cache: Annotated[str, Names("output")] = Field(
        default=MODEL_CACHE,
        description="for a copy of a checkpoint that comes from an object store",
    )

    @model_validator(mode="after")
    def _uris_have_two_slashes(self) -> Self:
        # It would become a local directory of that name, while a service would look in the store.
        if re.match(r"[a-z0-9]+:/(?!/)", self.destination):
            raise ValueError(
                f"destination {self.destination} has one slash where a URI has two, as in "
                "s3://bucket/models/mars"
            )
        return self
