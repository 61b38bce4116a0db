"""What a stage trains: its step and objective, and how a checkpoint holds it; here of a model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.config.train import DeepSpeedEngine as DeepSpeedConfig
from mars_ray.errors import ModelError
from mars_ray.model.adapters import adapter_weights, add_adapters, merged
from mars_ray.model.card import read_card
from mars_ray.model.directory import check_names
from mars_ray.model.load import load_model, load_tokenizer
from mars_ray.model.save import save_model
from mars_ray.train import checkpoint
from mars_ray.train.checkpoint import TrainState
from mars_ray.train.deepspeed import loading_in_parts, zero_settings
from mars_ray.train.engine import Step
from mars_ray.train.model_step import TrainStep
from mars_ray.train.objective import StageObjective
from mars_ray.train.plan import StagePlan
from mars_ray.train.ranks import Ranks
from mars_ray.train.throughput import Flops, ModelFlops


@dataclass(frozen=True, slots=True)
class Trainee:
    """What an engine wraps, and what surrounds it."""

    step: Step
    objective: StageObjective
    flops: Flops
    # A checkpoint's `model/` from the engine's weights, and what lies beside it; on rank 0.
    write: Callable[[Path, dict[str, Tensor], TrainState], None]


def model_trainee(plan: StagePlan, ranks: Ranks, resume_from: Path | None) -> Trainee:
    """The model itself, all of it or by adapters that are merged. Raises ModelError."""
    model_dir = resume_from / checkpoint.MODEL if resume_from else plan.start_model
    model, tokenizer = _load_model(plan, resume_from, ranks), load_tokenizer(model_dir)
    card = read_card(model_dir)
    objective = StageObjective.of(plan.config, plan.seed, card.mask_token_id, plan.own_from)
    if objective.depths:
        card = replace(card, block_size=objective.depths)
    anchor = _load_anchor(plan, ranks) if objective.needs_anchor else None
    step = TrainStep(model, objective.acceptance_weight, anchor)

    def write(directory: Path, weights: dict[str, Tensor], state: TrainState) -> None:
        if plan.config.lora is not None:
            save_file(adapter_weights(weights), directory.with_name(checkpoint.ADAPTERS))
            weights = merged(model, weights)
        save_model(directory, model, tokenizer, card, weights)

    return Trainee(step, objective, ModelFlops.of(model), write)


def stage_zero_settings(plan: StagePlan, zero: DeepSpeedConfig, ranks: Ranks) -> dict[str, Any]:
    """DeepSpeed's settings for a stage."""
    return zero_settings(
        zero,
        plan.config.optimizer,
        bfloat16=plan.job.precision == "bfloat16",
        micro_batch_size=plan.micro_batch_size(ranks.world_size),
    )


def _load_model(plan: StagePlan, resume_from: Path | None, ranks: Ranks) -> PreTrainedModel:
    lora = plan.config.lora
    directory = plan.start_model
    # What adapters were added to is not in the checkpoint, whose model has them merged.
    if resume_from is not None and lora is None:
        directory = resume_from / checkpoint.MODEL
    # Float32: the master weights. DeepSpeed casts to bfloat16 itself and keeps its own masters.
    load = partial(load_model, directory, dtype=torch.float32, attention=_attention(ranks))
    zero = plan.job.engine
    if isinstance(zero, DeepSpeedConfig) and zero.zero_stage == 3 and ranks.world_size > 1:
        # No worker may ever hold a whole model. What comes is cast already.
        with loading_in_parts(stage_zero_settings(plan, zero, ranks), ranks):
            model = _loaded_by_all(partial(load, device=ranks.device), directory, ranks)
    else:
        model = load()
    model.train()
    if lora is not None:
        settings = lora.model_dump()
        add_adapters(model, seed=plan.seed, **settings)
        if resume_from is not None:
            model.load_state_dict(load_file(resume_from / checkpoint.ADAPTERS), strict=False)
    if plan.job.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if plan.job.compile:
        # Batches differ in width and rows.
        model.base_model.compile(dynamic=True)
    return model


def _loaded_by_all(
    load: Callable[[], PreTrainedModel], directory: Path, ranks: Ranks
) -> PreTrainedModel:
    """What rank 0 finds wrong with the weights, when all have come, is every rank's error."""
    problem, model = None, None
    try:
        model = load()
        # transformers does not look for these where parameters are split.
        check_names(directory, model.state_dict().keys(), model.base_model_prefix)
    except ModelError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            # This rank alone, and the others wait for it in a collective: its end is theirs.
            raise error.__cause__ from error
        problem = error
    with ranks.together():
        if problem:
            raise problem
    assert model is not None
    return model


def _load_anchor(plan: StagePlan, ranks: Ranks) -> PreTrainedModel:
    """The starting model, which stays as it is."""
    dtype = torch.bfloat16 if plan.job.precision == "bfloat16" else torch.float32
    model = load_model(
        plan.start_model, dtype=dtype, device=ranks.device, attention=_attention(ranks)
    )
    return model.requires_grad_(False)


def _attention(ranks: Ranks) -> str:
    return "flex_attention" if ranks.device.type == "cuda" else "sdpa"
