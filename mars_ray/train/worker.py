"""A stage on one worker, without Ray: build its parts, restore, train.

What a stage trains, a model or a draft adapter, is a module, with a form of its own in checkpoints.
"""

import pickle
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.config.inputs import PretrainedModel
from mars_ray.config.train import DeepSpeedEngine as DeepSpeedConfig
from mars_ray.config.train import DraftObjective, MarsObjective
from mars_ray.core.layout import TokenBatch
from mars_ray.data.loader import Loader, eval_batches
from mars_ray.errors import (
    CheckpointError,
    MarsError,
    MemoryShortError,
    ModelError,
    NonFiniteLossError,
    TrainingError,
)
from mars_ray.model.adapters import adapter_weights, add_adapters, merged
from mars_ray.model.directory import check_names, fingerprint, read_card
from mars_ray.model.draft_adapter import read_draft_adapter, read_draft_card, write_draft_adapter
from mars_ray.model.load import load_model, load_tokenizer, save_model
from mars_ray.model.places import local_copy
from mars_ray.model.shape import shape_of
from mars_ray.provenance import provenance
from mars_ray.storage.place import Place
from mars_ray.train import checkpoint
from mars_ray.train.checkpoint import CheckpointManager, TrainState, newest
from mars_ray.train.deepspeed import DeepSpeedEngine, gathered, loading_in_parts, zero_settings
from mars_ray.train.draft_adapter import (
    EMBEDDING,
    DraftStep,
    adapter_of,
    draft_card,
    fresh_weights,
    weights_of,
)
from mars_ray.train.engine import Engine, PlainEngine, Step
from mars_ray.train.frozen import FrozenModel
from mars_ray.train.loop import Report, StageOutcome, StageParts, TrainLoop
from mars_ray.train.memory import RowSize, advice, check_memory
from mars_ray.train.metrics import DraftFlops, Flops, ModelFlops, RankTimer, peak_flops
from mars_ray.train.model_step import StageObjective, TrainStep
from mars_ray.train.plan import StagePlan, known_hashes
from mars_ray.train.ranks import Ranks, Watchdog


@dataclass(frozen=True, slots=True)
class StageModule:
    """The step that an engine wraps, and its parts."""

    step: Step
    objective: StageObjective
    flops: Flops
    # Writes a checkpoint's `model/` and the files beside it from the engine's weights; on rank 0.
    write: Callable[[Path, dict[str, Tensor], TrainState], None]


def model_module(plan: StagePlan, ranks: Ranks, resume_from: Path | None) -> StageModule:
    """A model that is trained: either all of it, or LoRA that is merged. Raises ModelError."""
    model_dir = resume_from / checkpoint.MODEL if resume_from else plan.start_model
    card = read_card(model_dir)
    model = _load_model(plan, resume_from, ranks, card.mask_token_id)
    tokenizer = load_tokenizer(model_dir)
    objective = StageObjective.of(plan.config, plan.seed, card.mask_token_id, plan.own_from)
    if objective.depths:
        card = replace(card, block_size=objective.depths)
    anchor = None
    mars = plan.config.objective
    if plan.own_from is not None and isinstance(mars, MarsObjective) and mars.anchor_weight:
        # The starting model, frozen.
        dtype = torch.bfloat16 if plan.job.precision == "bfloat16" else torch.float32
        attention = _attention(ranks)
        anchor = load_model(plan.start_model, dtype=dtype, device=ranks.device, attention=attention)
        anchor.requires_grad_(False)
    step = TrainStep(model, objective.acceptance_weight, anchor)

    def write(directory: Path, weights: dict[str, Tensor], state: TrainState) -> None:
        if plan.config.lora is not None:
            save_file(adapter_weights(weights), directory.with_name(checkpoint.ADAPTERS))
            weights = merged(model, weights, card.mask_token_id)
        save_model(directory, model, tokenizer, card, weights)

    return StageModule(step, objective, ModelFlops.of(model), write)


def _load_model(
    plan: StagePlan, resume_from: Path | None, ranks: Ranks, mask_token_id: int | None
) -> PreTrainedModel:
    lora = plan.config.lora
    directory = plan.start_model
    # With LoRA the checkpoint's model has the adapters merged, so the start model is loaded.
    if resume_from is not None and lora is None:
        directory = resume_from / checkpoint.MODEL
    # Float32 master weights; DeepSpeed casts to bfloat16 itself and keeps its own masters.
    load = partial(load_model, directory, dtype=torch.float32, attention=_attention(ranks))
    zero = plan.job.engine
    if isinstance(zero, DeepSpeedConfig) and zero.zero_stage == 3 and ranks.world_size > 1:
        # No worker may ever hold a whole model. The loaded weights are already cast.
        with loading_in_parts(zero_settings(plan, ranks), ranks):
            model = _loaded_by_all(partial(load, device=ranks.device), directory, ranks)
    else:
        model = load()
    model.train()
    if lora is not None:
        settings = lora.model_dump()
        add_adapters(model, mask_token_id, gathered, seed=plan.seed, **settings)
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
    """Load in parts; an error that rank 0 finds in the weights is raised on every rank."""
    problem, model = None, None
    try:
        model = load()
        # transformers does not check names where parameters are split.
        check_names(directory, model.state_dict().keys(), model.base_model_prefix)
    except ModelError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            # Only this rank failed, and the others wait for it in a collective: its end ends them.
            raise error.__cause__ from error
        problem = error
    with ranks.barrier():
        if problem:
            raise problem
    assert model is not None
    return model


def _attention(ranks: Ranks) -> str:
    return "flex_attention" if ranks.device.type == "cuda" else "sdpa"


def draft_module(plan: StagePlan, ranks: Ranks, resume_from: Path | None) -> StageModule:
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
    name, named = plan.start_model.name, plan.job.model
    if isinstance(named, PretrainedModel) and not Path(named.path).is_absolute():
        name = named.path  # of the hub
    hidden = base.embedding_VH.shape[1]
    card = draft_card(config, settings.max_block_size, hidden, name, fingerprint(plan.start_model))
    before: dict[str, Any] | None = None  # the training of the adapter to start from
    if plan.start_adapter is not None:
        before = read_draft_card(plan.start_adapter).training or None
    if resume_from is not None:
        weights = load_file(resume_from / checkpoint.ADAPTERS)
    elif plan.start_adapter is not None:
        adapter = read_draft_adapter(plan.start_adapter, plan.start_model)
        weights = weights_of(adapter, card, base)
    else:
        weights = fresh_weights(card, base, plan.seed, read_card(plan.start_model).trained_mask_id)
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
        training = {
            "job": plan.job.name,
            "stage": plan.stage,
            "steps": state.step,
            "mask_tokens": state.mask_tokens,
            "seconds": round(state.seconds, 1),
            "data": plan.data,
            "started_from": before,
            "provenance": provenance(),
        }
        write_draft_adapter(directory, adapter_of(whole, replace(card, training=training), base))

    return StageModule(
        step,
        StageObjective.of(plan.config, plan.seed, None),
        DraftFlops(flops, sum(lora) + sum(head), settings.grids),
        write,
    )


# torch's message when the CPU's memory is full; for CUDA's it has a separate exception.
_CPU_SHORT = "can't allocate memory"


def unpacked(pickled: bytes, ranks: Ranks) -> StagePlan:
    """Read a plan that was pickled on another machine; collective.

    Raises TrainingError on every rank if one of them does not see the files that it names.
    """
    try:
        with ranks.barrier():
            return pickle.loads(pickled)
    except CheckpointError as error:
        raise TrainingError(
            f"{error}. output_dir and data.cache_dir must be on storage that all nodes share, "
            "mounted at the same place"
        ) from error


def resume_stage(plan: StagePlan, ranks: Ranks, report: Report) -> StageOutcome | MarsError:
    """`train_stage` from the newest checkpoint of the run directory, if it has one; collective."""
    found = ranks.gather((socket.gethostname(), plan.run_dir.is_dir(), newest(plan.run_dir)))
    if blind := sorted({host for host, sees, _ in found if not sees}):
        return TrainingError(
            f"{', '.join(blind)} does not see {plan.run_dir}: output_dir must be on storage that "
            "all nodes share, mounted at the same place"
        )
    # Rank 0's: network file systems may show it to others later.
    return train_stage(plan, ranks, found[0][2], report)


def train_stage(
    plan: StagePlan, ranks: Ranks, resume_from: Path | None, report: Report
) -> StageOutcome | MarsError:
    """Run a stage, or the rest of it, on this rank; collective.

    An error that every rank meets alike is returned, not raised: a worker that raises is started
    again, and would meet it again. (All ranks read the same files, and see the same gradient norm.)
    """
    torch.manual_seed(plan.seed + ranks.rank)
    try:
        with ranks.alike():
            restored = _read_checkpoint(plan, resume_from) if resume_from else None
        parts = _assemble(plan, ranks, resume_from, restored, report)
    except MarsError as error:
        return error
    loop = TrainLoop(parts, restored)
    if resume_from and restored:
        parts.engine.load_optimizer_state(
            checkpoint.read_rank_state(resume_from, rank)["optimizer"]
            for rank in range(restored.world_size)
        )
        if restored.world_size == ranks.world_size:
            mine = checkpoint.read_rank_state(resume_from, ranks.rank)
            checkpoint.load_random_state(mine["random"], ranks.device)
            loop.meter.load(mine["meter"])
    try:
        with parts.watchdog:
            outcome = loop.run()
        if parts.manager is not None:
            parts.manager.close()
        return outcome
    except (NonFiniteLossError, CheckpointError) as error:
        return error
    except (MemoryError, RuntimeError) as error:
        short = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not short and _CPU_SHORT not in str(error):
            raise
        raise MemoryShortError(
            f"stage {plan.stage!r} ran out of memory: {str(error).splitlines()[0]} "
            f"{advice(plan.job, plan.config)}; the last checkpoint is untouched"
        ) from error


def _assemble(
    plan: StagePlan,
    ranks: Ranks,
    resume_from: Path | None,
    restored: TrainState | None,
    report: Report,
) -> StageParts:
    base = plan.job.model
    is_draft = plan.config.adapter is not None
    with ranks.alike():
        if is_draft and isinstance(base, PretrainedModel) and not plan.start_model.is_dir():
            # Of the hub: this worker's node fetches the same commit.
            source = Place(base.path, revision=plan.start_model.name)
            if source.is_on_hub:
                plan = replace(plan, start_model=local_copy(source, cache=""))
    row = RowSize.of(plan.train, plan.job.data)
    check_memory(shape_of(plan.start_model), plan.job, plan.config, row, ranks)
    module = (draft_module if is_draft else model_module)(plan, ranks, resume_from)
    micro_batch_size = plan.micro_batch_size(ranks.world_size)
    loader = Loader(
        plan.train,
        global_batch_size=plan.config.global_batch_size,
        micro_batch_size=micro_batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=plan.seed,
        packing=plan.job.data.packing,
        max_length=plan.job.data.max_length,
    )
    if restored:
        loader.restore(restored.loader)
    timer = RankTimer(ranks)
    engine = make_engine(plan, module.step, ranks, timer)
    held_out: Callable[[], Iterable[TokenBatch]] | None = None
    if plan.eval is not None:
        held_out = partial(
            eval_batches,
            plan.eval,
            micro_batch_size=micro_batch_size,
            rank=ranks.rank,
            world_size=ranks.world_size,
            limit=plan.config.eval_rows,
        )
    manager = None
    with ranks.barrier():
        if ranks.is_main:
            manager = CheckpointManager(plan.run_dir, plan.job.checkpoint, plan.stage)

    def write_model(directory: Path, state: TrainState) -> None:
        weights = engine.weights()
        if weights is not None:
            module.write(directory, weights, state)

    return StageParts(
        plan=plan,
        ranks=ranks,
        engine=engine,
        objective=module.objective,
        loader=loader,
        total_steps=plan.total_steps(loader.steps_per_epoch),
        eval_batches=held_out,
        write_model=write_model,
        report=report,
        manager=manager,
        flops=module.flops,
        peak_flops=peak_flops(
            ranks, plan.job.cluster.peak_tflops, bfloat16=plan.job.precision == "bfloat16"
        ),
        timer=timer,
        watchdog=Watchdog(plan.stacks_dir, ranks.rank, plan.job.cluster.step_timeout_s),
    )


def make_engine(plan: StagePlan, step: Step, ranks: Ranks, timer: RankTimer) -> Engine:
    optimizer = plan.config.optimizer
    if isinstance(plan.job.engine, DeepSpeedConfig):
        settings = zero_settings(plan, ranks)
        return DeepSpeedEngine(step, optimizer, ranks, settings=settings, timer=timer)
    bfloat16 = plan.job.precision == "bfloat16"
    return PlainEngine(step, optimizer, ranks, bfloat16=bfloat16, timer=timer)


def _read_checkpoint(plan: StagePlan, directory: Path) -> TrainState:
    checkpoint.verify(directory)
    state = checkpoint.read_state(directory)
    if state.identity not in known_hashes(plan.job):
        raise CheckpointError(
            f"{directory} was written by another job (its resolved configuration differs). "
            "Choose another output_dir, or delete this one"
        )
    if state.data != plan.data:
        raise CheckpointError(
            f"{directory} was trained on other conversations than there are now: a file of [data] "
            "has changed, or how it is tokenised. Put it back, or choose another output_dir"
        )
    return state
