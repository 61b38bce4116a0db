"""A job of `benchmarks/compare_decoders.py`."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from mars_ray.config.base import DISTINCT, AdapterPath, Config, ModelPath, Precision
from mars_ray.config.evaluate import PromptsTask
from mars_ray.config.inputs import PresetName
from mars_ray.config.modes import ExactMode, Modes, VerifiedMode

Peer = Literal[
    "vllm",
    "vllm-ngram",
    "vllm-mars",
    "transformers",
    "transformers-lookup",
    "transformers-continuous",
    "llamacpp",
    "llamacpp-q8",
    "llamacpp-lookup",
    "pace",
]
# Peers that decode one sequence at a time.
ALONE = ("transformers-lookup",)
Temperature = Annotated[float, Field(ge=0, le=2)]


class LockstepDecoder(Config):
    """The paper's decoding of padded batches, with a cache or without (for ablation)."""

    cache: Literal["none", "token", "block"]
    threshold: float = Field(default=0.95, ge=0, le=1)


class BenchDecodeJob(Config):
    """Our modes and other decoders on one checkpoint, measured in turn."""

    kind: Literal["bench-decode"] = "bench-decode"
    checkpoint: ModelPath | None = None
    random_weights: PresetName | None = Field(
        default=None, description="instead of a checkpoint: a shape, for the cost of a step"
    )
    draft_adapter: AdapterPath | None = Field(
        default=None,
        description="adapter of our modes and of vllm-mars, as a service's `engine.draft_adapter`",
    )
    modes: Modes = Field(default=(ExactMode(), VerifiedMode()), min_length=1)
    oracle_drafts: Annotated[tuple[Annotated[int, Field(ge=1, le=63)], ...], DISTINCT] = Field(
        default=(),
        description="replay `exact`'s answers as so many drafts a step: our engine's ceiling",
    )
    peers: Annotated[tuple[Peer, ...], DISTINCT] = Field(
        default=(), description="one that is not installed is left out, and the result says so"
    )
    lockstep: Annotated[tuple[LockstepDecoder, ...], DISTINCT] = ()
    peer_pythons: dict[Peer, str] = Field(
        default={},
        description="interpreters of peers with environments of their own; vllm's and llamacpp's "
        "are those of their variants, too",
    )
    batch_sizes: Annotated[tuple[PositiveInt, ...], DISTINCT] = Field(
        default=(1, 4, 8, 16), min_length=1
    )
    step_positions: Annotated[tuple[PositiveInt, ...], DISTINCT] = Field(
        default=(), description="measure a step by positions per sequence, at every batch size"
    )
    prompts: int = Field(default=16, ge=1, description="per round, in batches; at least one batch")
    task: PromptsTask | None = Field(
        default=None, description="prompts of files, as many of each kind; default: the corpus"
    )
    random_prompt_tokens: int | None = Field(
        default=None, ge=1, description="default: those of the task"
    )
    temperatures: Annotated[tuple[Temperature, ...], DISTINCT] = Field(
        default=(0.0,), min_length=1, description="0 is greedy"
    )
    window_control: bool = Field(
        default=True, description="false forces all masks, for T/F alone: no speeds are told"
    )
    max_new_tokens: int = Field(default=128, ge=1)
    max_context: int | None = Field(
        default=None, ge=8, description="tokens; default: 512, or what prompts and answers need"
    )
    repeats: int = Field(default=5, ge=1)
    dtype: Precision = "float32"
    threads: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if (self.checkpoint is None) == (self.random_weights is None):
            raise ValueError("name either checkpoint or random_weights")
        if self.random_weights and not self.random_prompt_tokens:
            raise ValueError("random_weights need random_prompt_tokens")
        return self

    @model_validator(mode="after")
    def _what_is_replayed(self) -> Self:
        if self.oracle_drafts and self.modes[0] != ExactMode():
            raise ValueError("oracle_drafts replay the answers of exact: let modes begin with it")
        if self.lockstep and any(self.temperatures):
            raise ValueError("lockstep is greedy: leave it out, or let temperatures be [0]")
        return self


# Job kinds in the form that `load_job` needs.
KINDS: dict[str, type[Config]] = {"bench-decode": BenchDecodeJob}
