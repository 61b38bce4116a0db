"""The mask schedule: all settings of the noisy stream that a sweep may change."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mars_ray.config.base import Config

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
