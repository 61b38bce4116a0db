"""A draft adapter as what a stage trains, and its form in checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mars_ray.config.model import PretrainedModel
from mars_ray.config.train import DraftObjective
from mars_ray.model.card import read_card
from mars_ray.model.directory import fingerprint
from mars_ray.model.draft_adapter import (
    DraftCard,
    read_draft_adapter,
    read_draft_card,
    write_draft_adapter,
)
from mars_ray.model.load import load_model
from mars_ray.model.places import local_copy
from mars_ray.provenance import provenance
from mars_ray.storage.place import Place
from mars_ray.train import checkpoint
from mars_ray.train.checkpoint import TrainState
from mars_ray.train.draft_adapter import (
    EMBEDDING,
    adapter_of,
    draft_card,
    fresh_weights,
    weights_of,
)
from mars_ray.train.draft_step import DraftStep
from mars_ray.train.frozen import FrozenModel
from mars_ray.train.objective import StageObjective
from mars_ray.train.plan import StagePlan
from mars_ray.train.ranks import Ranks
from mars_ray.train.throughput import DraftFlops, ModelFlops
from mars_ray.train.trainee import Trainee


def with_base_here(plan: StagePlan) -> StagePlan:
    """The plan of a worker whose node may have no copy of a base from the hub yet: the same
    commit. Raises ModelError."""
    model = plan.job.model
    if plan.start_model.is_dir() or not isinstance(model, PretrainedModel):
        return plan
    source = Place(model.path, revision=plan.start_model.name)
    return replace(plan, start_model=local_copy(source, cache="")) if source.is_on_hub else plan


def draft_trainee(plan: StagePlan, ranks: Ranks, resume_from: Path | None) -> Trainee:
    """An adapter beside the frozen model of `plan.start_model`, which every rank holds whole.

    Raises ModelError.
    """
    settings, config = plan.config.objective, plan.config.adapter
    assert isinstance(settings, DraftObjective), "an adapter is trained by objective draft"
    assert config is not None, "the config demands an adapter"
    dtype = torch.bfloat16 if plan.job.precision == "bfloat16" else torch.float32
    model = load_model(plan.start_model, dtype=dtype, device=ranks.device)
    flops = ModelFlops.of(model)
    base = FrozenModel(model)
    card = draft_card(
        config,
        settings.max_block_size,
        base.embedding_VH.shape[1],
        _base_name(plan),
        fingerprint(plan.start_model),
    )
    weights = _start(plan, card, base, resume_from)
    step = DraftStep(
        base,
        card,
        weights,
        settings,
        gradient_checkpointing=plan.job.gradient_checkpointing,
    )
    if not config.train_mask_embeddings:
        step.get_parameter(EMBEDDING).requires_grad_(False)
    fixed = {name: weights[name] for name, p in step.named_parameters() if not p.requires_grad}
    lora = [p.numel() for name, p in step.named_parameters() if name.startswith("layer_")]
    head = [p.numel() for name, p in step.named_parameters() if name.startswith("head_")]

    def write(directory: Path, weights: dict[str, Tensor], state: TrainState) -> None:
        written = (fixed | weights).items()
        whole = {name: w.detach().float().cpu().contiguous() for name, w in written}
        save_file(whole, directory.with_name(checkpoint.ADAPTERS))
        said = replace(card, training=_training(plan, state))
        write_draft_adapter(directory, adapter_of(whole, said, base))

    return Trainee(
        step,
        StageObjective.of(plan.config, plan.seed, None),
        DraftFlops(flops, sum(lora) + sum(head), settings.grids),
        write,
    )


def _start(
    plan: StagePlan, card: DraftCard, base: FrozenModel, resume_from: Path | None
) -> dict[str, Tensor]:
    if resume_from is not None:
        return load_file(resume_from / checkpoint.ADAPTERS)
    if plan.start_adapter is not None:
        adapter = read_draft_adapter(plan.start_adapter, plan.start_model)
        return weights_of(adapter, card, base)
    return fresh_weights(card, base, plan.seed, read_card(plan.start_model).trained_mask_id)


def _base_name(plan: StagePlan) -> str:
    """For people: a hub name, or the last part of a path."""
    model = plan.job.model
    if isinstance(model, PretrainedModel) and not Path(model.path).is_absolute():
        return model.path
    return plan.start_model.name


def _training(plan: StagePlan, state: TrainState) -> dict[str, Any]:
    """How it came about, for the card."""
    before: dict[str, Any] = {}
    if plan.start_adapter is not None:
        before = read_draft_card(plan.start_adapter).training
    return {
        "job": plan.job.name,
        "stage": plan.stage,
        "steps": state.step,
        "mask_tokens": state.mask_tokens,
        "seconds": round(state.seconds, 1),
        "data": plan.data,
        "started_from": before or None,
        "provenance": provenance(),
    }
