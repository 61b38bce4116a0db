"""A training job: a model, data, and stages run one after the other.

The mask schedule, what a sweep may change of the noisy stream, is part of an objective.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from mars_ray.config.base import AdapterPath, Config, JobName, Names, Precision, name_of
from mars_ray.config.inputs import DataConfig, ModelConfig, PretrainedModel
from mars_ray.errors import ConfigError

BlockSizeTokens = Annotated[int, Field(ge=1, le=64)]


class ConstantBlockSize(Config):
    """The same block size for every sample."""

    type: Literal["constant"] = "constant"
    size: BlockSizeTokens = 4


class MixedBlockSize(Config):
    """Each sample draws its block size by weight."""

    type: Literal["mixed"] = "mixed"
    sizes: tuple[BlockSizeTokens, ...] = Field(min_length=1)
    weights: tuple[Annotated[float, Field(gt=0)], ...]

    @model_validator(mode="after")
    def _one_weight_per_size(self) -> Self:
        if len(self.sizes) != len(self.weights):
            raise ValueError(f"{len(self.sizes)} sizes but {len(self.weights)} weights")
        return self


class CurriculumStep(Config):
    """A block size, from this share of training on."""

    progress: float = Field(ge=0, lt=1)
    size: BlockSizeTokens


class CurriculumBlockSize(Config):
    """The block size changes as training goes on."""

    type: Literal["curriculum"] = "curriculum"
    steps: tuple[CurriculumStep, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ordered_from_zero(self) -> Self:
        if self.steps[0].progress != 0:
            raise ValueError("the first step must start at progress 0")
        if any(a.progress >= b.progress for a, b in pairwise(self.steps)):
            raise ValueError("steps must be in rising order of progress")
        return self


BlockSize = Annotated[
    ConstantBlockSize | MixedBlockSize | CurriculumBlockSize, Field(discriminator="type")
]


class LinearWeight(Config):
    """A weight that moves linearly from `start` to `end` over training."""

    start: float = Field(ge=0)
    end: float = Field(ge=0)


class BlockSchedule(Config):
    """Which response tokens get masks, and how much each depth counts."""

    block_size: BlockSize = ConstantBlockSize()
    noisy_share: float = Field(
        default=1.0, gt=0, le=1, description="share of the response's blocks that get a noisy copy"
    )
    depth_weights: tuple[Annotated[float, Field(ge=0)], ...] | None = Field(
        default=None,
        description="weight of depths 1, 2, ...; the last one holds for all deeper; default 1",
    )

    @model_validator(mode="after")
    def _some_depth_counts(self) -> Self:
        weights = self.depth_weights
        if weights is not None and not any(weights[: self.max_block_size]):
            raise ValueError(
                f"depth_weights are zero for all depths up to {self.max_block_size}, the block "
                "size: the noisy stream would teach nothing"
            )
        return self

    @property
    def max_block_size(self) -> int:
        """Largest block size of the schedule, in tokens: the depth the model is trained for."""
        match self.block_size:
            case ConstantBlockSize(size=size):
                return size
            case MixedBlockSize(sizes=sizes):
                return max(sizes)
            case CurriculumBlockSize(steps=steps):
                return max(step.size for step in steps)


class MaskSchedule(BlockSchedule):
    """A pure function of training progress, sample and seed once given to `core.mask_schedule`."""

    layout: Literal["compact", "paper"] = "compact"
    grid: Literal["zero", "response", "random"] = Field(
        default="zero",
        description="where the block grid starts: position 0, the response, or anywhere",
    )
    noisy_on: Literal["own", "all"] | None = Field(
        default=None,
        description="with data.own: whether the noisy stream leaves the data out; default own",
    )
    anchor_weight: float | None = Field(
        default=None,
        ge=0,
        description="with data.own: how much a clean row of an own answer counts, beside one of "
        "the data; it is held to the starting model's distribution; default 0",
    )
    acceptance_weight: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="0: noisy rows count alike; 1: by what each adds to the expected T/F",
    )
    # 2 kept the accuracy of the AR mode in 3 of 3 prototype runs, the paper's 1 in none.
    ar_weight: Annotated[float, Field(ge=0)] | LinearWeight = 2.0


class ArObjective(Config):
    """Ordinary next-token loss on the response (stage 1)."""

    type: Literal["ar"] = "ar"


class MarsObjective(MaskSchedule):
    """Next-token loss on the clean stream plus the noisy stream's (stage 2)."""

    type: Literal["mars"] = "mars"


class DraftObjective(BlockSchedule):
    """Mask rows of a draft adapter, held to what the frozen model predicts at their positions."""

    type: Literal["draft"] = "draft"
    grids: int = Field(
        default=2,
        ge=1,
        description="random block grids of a conversation in one forward; as many as the block "
        "size: every token starts a block",
    )
    loss: Literal["kl", "ce", "tv", "tv_kl"] = Field(
        default="kl",
        description="KL divergence, total variation or both (0.9 of the second) against the clean "
        "row's distribution, or cross-entropy on the data's token",
    )
    row_loss_weight: float = Field(
        default=0.5,
        ge=0,
        description="weight of mask rows' own predictions, over the vocabulary",
    )
    head_loss_weight: float = Field(
        default=1.0, ge=0, description="weight of the sequential head's choices among candidates"
    )

    @model_validator(mode="after")
    def _grids_are_distinct(self) -> Self:
        if self.grids > self.max_block_size:
            raise ValueError(
                f"grids {self.grids} is more than the block size {self.max_block_size}: there are "
                "no more distinct ones"
            )
        return self


Objective = Annotated[ArObjective | MarsObjective | DraftObjective, Field(discriminator="type")]
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Config):
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: float = Field(gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0, description="on matrices only")
    warmup_share: float = Field(default=0.03, ge=0, lt=1, description="share of the stage's steps")
    final_share: float = Field(default=0.0, ge=0, le=1, description="last over peak learning rate")
    max_grad_norm: float = Field(default=1.0, gt=0)


class LoraConfig(Config):
    """Low-rank adapters on all of the layers' matrices, and the mask's embedding; the rest is
    frozen, other embeddings too.

    Every checkpoint's model has them merged, so it is an ordinary one.
    """

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32, gt=0, description="they are added with alpha / rank")
    dropout: float = Field(default=0.0, ge=0, lt=1)


LinearName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEAR_NAMES: tuple[LinearName, ...] = get_args(LinearName)


class DraftAdapterConfig(Config):
    """The weights trained beside a frozen model: mask embeddings, LoRA on mask rows, a head."""

    train_mask_embeddings: bool = Field(
        default=True,
        description="otherwise they stay where they start: the mask token's of a model that MARS "
        "has fine-tuned, and else the vocabulary's mean",
    )
    rank: int = Field(default=32, ge=0, description="rank of the LoRA; 0: none")
    alpha: float | None = Field(
        default=None, gt=0, description="the LoRA is added with alpha / rank; default: 2 * rank"
    )
    targets: tuple[LinearName, ...] = Field(
        default=LINEAR_NAMES, min_length=1, description="the layers' matrices that get a LoRA"
    )
    head_size: int | None = Field(
        default=None,
        ge=0,
        description="hidden size of the sequential head; 0: none; default: twice the model's",
    )
    candidates: int = Field(
        default=64, ge=2, description="a row's likeliest tokens, among which the head chooses"
    )
    start_from: AdapterPath | None = Field(
        default=None, min_length=1, description="the directory of an adapter to go on from"
    )

    @model_validator(mode="after")
    def _lora_settings_matter(self) -> Self:
        if self.rank == 0 and (self.alpha is not None or self.targets != LINEAR_NAMES):
            raise ValueError("alpha and targets have no effect with rank 0")
        if len(set(self.targets)) != len(self.targets):
            raise ValueError("targets are named twice")
        return self


class StageConfig(Config):
    """One stage: an objective, an optimizer and how long."""

    objective: Objective
    optimizer: OptimizerConfig
    steps: int | None = Field(default=None, ge=1)
    epochs: float | None = Field(default=None, gt=0)
    minutes: float | None = Field(
        default=None,
        gt=0,
        description="as many steps as fit, by the time of those done so far, at most `epochs`",
    )
    global_batch_size: int = Field(ge=1, description="rows per optimizer step, over all workers")
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="rows per forward on one worker; default: its share of the batch",
    )
    lora: LoraConfig | None = None
    adapter: DraftAdapterConfig | None = Field(
        default=None, description="the draft adapter; needed by objective draft, and only there"
    )
    eval_every_steps: int | None = Field(default=None, ge=1, description="besides once at the end")
    eval_rows: int = Field(default=256, ge=1)

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None and self.minutes is None):
            raise ValueError("give either steps, or epochs or minutes, or both of these")
        return self

    @model_validator(mode="after")
    def _drafts_have_an_adapter(self) -> Self:
        if not isinstance(self.objective, DraftObjective):
            if self.adapter is not None:
                raise ValueError("adapter has no effect: only objective draft trains one")
            return self
        if self.adapter is None:
            raise ValueError("objective draft needs a section [adapter]; it may be empty")
        if self.lora is not None:
            raise ValueError("lora does not go with objective draft; adapter.rank is its LoRA")
        if self.adapter.rank == 0 and not self.adapter.train_mask_embeddings:
            if self.adapter.head_size == 0:
                raise ValueError("adapter has nothing to train: no embeddings, LoRA or head")
            if not self.objective.head_loss_weight:
                raise ValueError("objective.head_loss_weight 0 would train nothing of a head alone")
        if self.adapter.head_size == 0:
            if self.objective.head_loss_weight != 1:
                raise ValueError(
                    "objective.head_loss_weight has no effect with adapter.head_size 0"
                )
            if not self.objective.row_loss_weight:
                raise ValueError("objective.row_loss_weight 0 without a head would train nothing")
        elif not self.objective.row_loss_weight + self.objective.head_loss_weight:
            raise ValueError("row_loss_weight and head_loss_weight are both 0")
        return self


class TorchEngine(Config):
    """Plain PyTorch; data parallel by DDP when there are several workers."""

    type: Literal["torch"] = "torch"


class DeepSpeedEngine(Config):
    """DeepSpeed with ZeRO."""

    type: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[1, 2, 3] = 2
    offload: Literal["none", "optimizer", "all"] = Field(
        default="none", description="kept in the nodes' memory; all: the weights too (stage 3)"
    )

    @model_validator(mode="after")
    def _weights_are_offloaded_at_stage_3(self) -> Self:
        if self.offload == "all" and self.zero_stage != 3:
            raise ValueError("offload 'all' needs zero_stage 3; 'optimizer' works at every stage")
        return self


Engine = Annotated[TorchEngine | DeepSpeedEngine, Field(discriminator="type")]


class ClusterConfig(Config):
    """Workers that Ray Train asks the cluster for, and what each gets."""

    workers: int = Field(default=1, ge=1)
    min_workers: int | None = Field(
        default=None,
        ge=1,
        description="elastic: go on with as few while nodes are missing, then grow to `workers`",
    )
    resize_check_s: float | None = Field(
        default=None, gt=0, description="elastic: how often to look for room to grow; default 60"
    )
    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = Field(
        default="pack", description="on few nodes, on many, on one, on as many as workers"
    )
    cpus_per_worker: float = Field(default=1, gt=0)
    gpus_per_worker: float | None = Field(
        default=None, ge=0, description="default: one, where the cluster has any"
    )
    threads_per_worker: int | None = Field(
        default=None, ge=1, description="default: cpus_per_worker"
    )
    max_failures: int = Field(
        default=3, ge=-1, description="restarts of the worker group; -1: no limit"
    )
    step_timeout_s: float = Field(
        default=1800,
        gt=0,
        le=1e9,
        description="a step, evaluation or checkpoint that takes longer counts as hung: all ranks "
        "write their stacks into the run directory and are started again",
    )
    memory_check: bool = Field(
        default=True, description="refuse a stage that is estimated not to fit into memory"
    )
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        description="peak of a worker's device, for the logged utilisation; default: measured",
    )

    @model_validator(mode="after")
    def _elastic_range(self) -> Self:
        if self.min_workers is None:
            if self.resize_check_s is not None:
                raise ValueError("resize_check_s has no effect without min_workers")
        elif self.min_workers >= self.workers:
            raise ValueError(f"min_workers {self.min_workers} must be below workers {self.workers}")
        return self


class BestCheckpoint(Config):
    """Checkpoints kept by an evaluation metric; every checkpoint is then evaluated first."""

    metric: str = Field(default="eval_loss", pattern="^eval_")
    mode: Literal["min", "max"] | None = Field(
        default=None, description="default: max of tokens per forward and acceptance, min of losses"
    )
    keep: int = Field(default=1, ge=1)
    export: bool = Field(default=False, description="the stage's model is the best, not the last")

    @property
    def wants_highest(self) -> bool:
        if self.mode is None:
            return self.metric.startswith(("eval_tokens_per_forward", "eval_acceptance_"))
        return self.mode == "max"


class CheckpointConfig(Config):
    """When checkpoints are written and which are kept."""

    every_steps: int = Field(default=200, ge=1, description="besides one at the end of the stage")
    keep: int = Field(default=2, ge=1, description="the last ones")
    best: BestCheckpoint | None = None
    storage_path: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9]+://",
        description="URI (s3://, gs://, file://) that gets a copy of every checkpoint kept; a run "
        "whose output_dir is lost goes on from there",
    )


def evaluated_metrics(objective: Objective) -> list[str]:
    """The metrics of a stage's evaluation (`evaluate` of train/loop.py)."""
    losses = ["eval_loss", "eval_clean_ce"]
    if isinstance(objective, ArObjective):
        return losses
    depths = range(1, objective.max_block_size + 1)
    accepted = [f"eval_acceptance_{depth}" for depth in depths]
    drafts = ["eval_tokens_per_forward", *accepted]
    if isinstance(objective, DraftObjective):
        return ["eval_loss", "eval_row_loss", *drafts]
    return [*losses, "eval_noisy_ce", *drafts]


class TrainJob(Config):
    """Stages run in order; each starts from the model the one before it left."""

    kind: Literal["train"] = "train"
    name: JobName
    output_dir: Annotated[str, Names("output")] = Field(
        min_length=1, description="run directory, shared by all nodes"
    )
    # Later stages use slightly larger seeds, which must fit 64 bits too.
    seed: int = Field(default=0, ge=0, lt=2**62)
    model: ModelConfig
    data: DataConfig
    stages: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")], StageConfig] = Field(
        min_length=1
    )
    engine: Engine = TorchEngine()
    precision: Precision = "bfloat16"
    gradient_checkpointing: bool = False
    compile: bool = Field(
        default=False, description="torch.compile of the layers; minutes at the start"
    )
    log_every_steps: int = Field(default=10, ge=1)
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _own_answers_matter(self) -> Self:
        schedules = {
            name: stage.objective
            for name, stage in self.stages.items()
            if isinstance(stage.objective, MarsObjective)
        }
        if self.data.own and not schedules:
            raise ValueError("data.own has no effect: no stage has objective mars")
        for name, schedule in schedules.items():
            for key in ("noisy_on", "anchor_weight"):
                if not self.data.own and getattr(schedule, key) is not None:
                    raise ValueError(f"stages.{name}.objective.{key} has no effect: no data.own")
        return self

    @model_validator(mode="after")
    def _drafts_have_a_base(self) -> Self:
        stages = list(self.stages.values())
        is_draft = [isinstance(stage.objective, DraftObjective) for stage in stages]
        if all(is_draft) and not isinstance(self.model, PretrainedModel):
            raise ValueError("objective draft needs model.type pretrained, or a stage before it")
        if True in is_draft and not all(is_draft[is_draft.index(True) :]):
            raise ValueError("stages with objective draft come last: they leave no other model")
        if self.compile and any(is_draft):
            raise ValueError("compile has no effect on objective draft")
        return self

    @model_validator(mode="after")
    def _anchored_rows_are_everywhere(self) -> Self:
        sharded = isinstance(self.engine, DeepSpeedEngine) and self.engine.zero_stage == 3
        if not sharded or self.cluster.workers == 1:
            return self
        for name, stage in self.stages.items():
            # Forwards are collective under ZeRO-3, but a worker's rows may have no anchored row.
            if isinstance(stage.objective, MarsObjective) and stage.objective.anchor_weight:
                raise ValueError(
                    f"stages.{name}.objective.anchor_weight does not work with engine.zero_stage 3 "
                    "on several workers; use stage 2"
                )
        return self

    @model_validator(mode="after")
    def _output_dir_is_a_directory(self) -> Self:
        if "://" in self.output_dir:
            raise ValueError(
                f"output_dir {self.output_dir} must be a directory that all nodes share; a URI "
                "goes to checkpoint.storage_path, which gets copies"
            )
        return self

    @model_validator(mode="after")
    def _best_is_evaluated(self) -> Self:
        best = self.checkpoint.best
        if best is None:
            return self
        if self.data.eval is None:
            raise ValueError("checkpoint.best needs data.eval")
        for name, stage in self.stages.items():
            known = evaluated_metrics(stage.objective)
            if best.metric not in known:
                raise ValueError(
                    f"checkpoint.best.metric {best.metric!r} is not among what stages.{name} "
                    f"evaluates: {', '.join(known)}"
                )
        return self

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        if self.cluster.min_workers is not None:
            # Some worker count in the range does not divide the batch: a rank has one row less.
            return self
        for name, stage in self.stages.items():
            rows = stage.global_batch_size
            if rows % self.cluster.workers:
                raise ValueError(
                    f"stages.{name}.global_batch_size {rows} does not divide by "
                    f"{self.cluster.workers} workers"
                )
            per_worker = rows // self.cluster.workers
            if per_worker % (stage.micro_batch_size or per_worker):
                raise ValueError(
                    f"stages.{name}: {per_worker} rows per worker do not divide by "
                    f"micro_batch_size {stage.micro_batch_size}"
                )
        return self


def training_of(
    model: str, overrides: Sequence[str], data: Sequence[str]
) -> tuple[Path | dict[str, Any], list[str]]:
    """A job's file, or the table of a job for a model that is named instead; with its overrides.

    A model gets the paper's two stages (arXiv 2604.07023, appendix), with steps of 32 rows in the
    place of 384. Raises ConfigError if nothing says what is learnt, or if a job is given files
    besides.
    """
    if model.endswith(".toml"):
        if data:
            raise ConfigError("a job names its data itself: override data.train.paths=")
        return Path(model), list(overrides)
    if not data:
        raise ConfigError(f"train {model}: name --data FILE, or give it a job")
    objectives = {"ar": {"type": "ar"}, "mars": {"type": "mars", "ar_weight": 1.0}}
    stages = {
        name: {
            "objective": objective,
            "epochs": 5,
            "global_batch_size": 32,
            "micro_batch_size": 1,
            "optimizer": {"learning_rate": 5e-6, "warmup_share": 0.03},
        }
        for name, objective in objectives.items()
    }
    for name, stage in stages.items():
        if any(override.startswith(f"stages.{name}.steps=") for override in overrides):
            del stage["epochs"]
    table = {
        "kind": "train",
        "name": name_of(model),
        "output_dir": f"runs/train-{name_of(model)}",
        "model": {"type": "pretrained", "path": model},
        "data": {"train": {"type": "files", "paths": list(data)}},
        "stages": stages,
    }
    return table, list(overrides)
