"""What one worker does for a stage: put the parts together, restore, train. No Ray in here."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mars_ray.config.train import DeepSpeedEngine as DeepSpeedConfig
from mars_ray.core.batch import TokenBatch
from mars_ray.data.loader import Loader, eval_batches
from mars_ray.errors import CheckpointError, MarsError, NonFiniteLossError
from mars_ray.model.card import read_card
from mars_ray.model.load import load_model, load_tokenizer
from mars_ray.model.save import save_model
from mars_ray.train import checkpoint
from mars_ray.train.checkpoint import TrainState
from mars_ray.train.deepspeed import DeepSpeedEngine
from mars_ray.train.engine import Engine, PlainEngine
from mars_ray.train.loop import (
    Report,
    StageOutcome,
    StageParts,
    TrainLoop,
    load_random_state,
)
from mars_ray.train.objective import StageObjective
from mars_ray.train.plan import StagePlan, identity_hash
from mars_ray.train.ranks import Ranks
from mars_ray.train.step import TrainStep


def train_stage(
    plan: StagePlan, ranks: Ranks, resume_from: Path | None, report: Report
) -> StageOutcome | MarsError:
    """Run a stage, or the rest of it, on this rank; collective.

    An error that every rank meets alike is returned, not raised: a worker that raises is started
    again, and would meet it again. (All ranks read the same files; all see the same gradient norm.)
    """
    torch.manual_seed(plan.seed + ranks.rank)
    try:
        restored = _read_checkpoint(plan, ranks, resume_from) if resume_from else None
        parts = _assemble(plan, ranks, resume_from, restored, report)
    except MarsError as error:
        return error
    loop = TrainLoop(parts, restored)
    if resume_from and restored:
        _restore_rank(parts, loop, resume_from, restored)
    try:
        return loop.run()
    except NonFiniteLossError as error:
        return error


def _assemble(
    plan: StagePlan,
    ranks: Ranks,
    resume_from: Path | None,
    restored: TrainState | None,
    report: Report,
) -> StageParts:
    model_dir = resume_from / checkpoint.MODEL if resume_from else plan.start_model
    model, tokenizer = _load_model(plan, model_dir, ranks), load_tokenizer(model_dir)
    card = read_card(model_dir)
    objective = StageObjective.of(plan.config, plan.seed, card.mask_token_id, plan.own_from)
    if objective.depths:
        card = replace(card, block_size=objective.depths)
    loader = _loader(plan, ranks)
    if restored:
        loader.restore(restored.loader)
    anchor = _load_anchor(plan, ranks) if objective.needs_anchor else None
    engine = make_engine(plan, TrainStep(model, objective.acceptance_weight, anchor), ranks)

    def write_model(directory: Path) -> None:
        weights = engine.weights()
        if weights is not None:
            save_model(directory, model, tokenizer, card, weights)

    return StageParts(
        plan=plan,
        ranks=ranks,
        engine=engine,
        objective=objective,
        loader=loader,
        total_steps=plan.total_steps(loader.steps_per_epoch),
        eval_batches=_evaluation(plan, ranks),
        write_model=write_model,
        report=report,
    )


def make_engine(plan: StagePlan, step: TrainStep, ranks: Ranks) -> Engine:
    """The engine that the job asks for."""
    bfloat16 = plan.job.precision == "bfloat16"
    optimizer = plan.config.optimizer
    if isinstance(plan.job.engine, DeepSpeedConfig):
        return DeepSpeedEngine(
            step,
            optimizer,
            ranks,
            bfloat16=bfloat16,
            zero_stage=plan.job.engine.zero_stage,
            micro_batch_size=plan.micro_batch_size(ranks.world_size),
        )
    return PlainEngine(step, optimizer, ranks, bfloat16=bfloat16)


def _load_model(plan: StagePlan, directory: Path, ranks: Ranks) -> PreTrainedModel:
    # Float32: the master weights. DeepSpeed casts to bfloat16 itself and keeps its own masters.
    attention = "flex_attention" if ranks.device.type == "cuda" else "sdpa"
    model = load_model(directory, dtype=torch.float32, attention=attention)
    model.train()
    if plan.job.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _load_anchor(plan: StagePlan, ranks: Ranks) -> PreTrainedModel:
    """The starting model, which stays as it is."""
    attention = "flex_attention" if ranks.device.type == "cuda" else "sdpa"
    dtype = torch.bfloat16 if plan.job.precision == "bfloat16" else torch.float32
    model = load_model(plan.start_model, dtype=dtype, attention=attention)
    model.eval().requires_grad_(False)
    return model.to(ranks.device)  # pyright: ignore[reportArgumentType]


def _loader(plan: StagePlan, ranks: Ranks) -> Loader:
    return Loader(
        plan.train,
        global_batch_size=plan.config.global_batch_size,
        micro_batch_size=plan.micro_batch_size(ranks.world_size),
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=plan.seed,
        packing=plan.job.data.packing,
        max_length=plan.job.data.max_length,
    )


def _evaluation(plan: StagePlan, ranks: Ranks) -> Callable[[], Iterable[TokenBatch]] | None:
    conversations = plan.eval
    if conversations is None:
        return None

    def batches() -> Iterable[TokenBatch]:
        return eval_batches(
            conversations,
            micro_batch_size=plan.micro_batch_size(ranks.world_size),
            rank=ranks.rank,
            world_size=ranks.world_size,
            limit=plan.config.eval_rows,
        )

    return batches


def _read_checkpoint(plan: StagePlan, ranks: Ranks, directory: Path) -> TrainState:
    checkpoint.verify(directory)
    state = checkpoint.read_state(directory)
    if state.identity != identity_hash(plan.job):
        raise CheckpointError(
            f"{directory} was written by another job (its resolved configuration differs). "
            "Choose another output_dir, or delete this one"
        )
    if isinstance(plan.job.engine, DeepSpeedConfig) and state.world_size != ranks.world_size:
        raise CheckpointError(
            f"{directory} was written by {state.world_size} workers, and ZeRO splits its state "
            f"among them: resume with cluster.workers={state.world_size}"
        )
    return state


def _restore_rank(
    parts: StageParts, loop: TrainLoop, directory: Path, restored: TrainState
) -> None:
    """Optimizer, random state and running means of this rank."""
    ranks = parts.ranks
    sharded = isinstance(parts.plan.job.engine, DeepSpeedConfig)
    # Without ZeRO every rank has the same optimizer state, and only rank 0 has written it.
    owner = checkpoint.read_rank_state(directory, ranks.rank if sharded else 0)
    parts.engine.load_optimizer_state(owner["optimizer"])
    if restored.world_size == ranks.world_size:
        mine = checkpoint.read_rank_state(directory, ranks.rank)
        load_random_state(mine["random"], ranks.device)
        loop.meter.load(mine["meter"])


def limit_threads(threads: int) -> None:
    """Cap this process's CPU threads; tokenizers would otherwise start their own."""
    torch.set_num_threads(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
