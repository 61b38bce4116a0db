"""What one worker does for a stage: put the parts together, restore, train. No Ray in here."""

import os
import pickle
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from mars_ray.config.train import DeepSpeedEngine as DeepSpeedConfig
from mars_ray.core.batch import TokenBatch
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
from mars_ray.model.card import read_card
from mars_ray.model.complete import check_names
from mars_ray.model.load import load_model, load_tokenizer
from mars_ray.model.save import save_model
from mars_ray.model.shape import shape_of
from mars_ray.train import checkpoint
from mars_ray.train.checkpoint import TrainState, newest
from mars_ray.train.deepspeed import DeepSpeedEngine, loading_in_parts, zero_settings
from mars_ray.train.engine import Engine, PlainEngine
from mars_ray.train.keeping import Keeper
from mars_ray.train.loop import (
    Report,
    StageOutcome,
    StageParts,
    TrainLoop,
    load_random_state,
)
from mars_ray.train.memory import RowSize, advice, check_memory
from mars_ray.train.objective import StageObjective
from mars_ray.train.plan import StagePlan, identity_hash
from mars_ray.train.ranks import Ranks
from mars_ray.train.speed import ModelFlops, OwnTime, peak_flops
from mars_ray.train.step import TrainStep
from mars_ray.train.watchdog import Watchdog

# What torch says where the CPU's memory ends; CUDA's has a class of its own.
_CPU_SHORT = "can't allocate memory"


def unpacked(pickled: bytes, ranks: Ranks) -> StagePlan:
    """A plan that was pickled on another machine; collective.

    Raises TrainingError on every rank if one of them does not see the files that it names.
    """
    try:
        with ranks.together():
            return pickle.loads(pickled)
    except CheckpointError as error:
        raise TrainingError(
            f"{error}. output_dir and data.cache_dir must be on storage that all nodes share, "
            "mounted at the same place"
        ) from error


def resume_stage(plan: StagePlan, ranks: Ranks, report: Report) -> StageOutcome | MarsError:
    """`train_stage` from the newest checkpoint of the run directory, if it has one; collective."""
    try:
        resume_from = _newest(plan, ranks)
    except TrainingError as error:
        return error
    return train_stage(plan, ranks, resume_from, report)


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
        with parts.watchdog, _memory_explained(plan):
            outcome = loop.run()
        if parts.keeper is not None:
            parts.keeper.close()
        return outcome
    except (NonFiniteLossError, CheckpointError) as error:
        return error


@contextmanager
def _memory_explained(plan: StagePlan) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and _CPU_SHORT not in str(
            error
        ):
            raise
        raise MemoryShortError(
            f"stage {plan.stage!r} ran out of memory: {str(error).splitlines()[0]} "
            f"{advice(plan.job, plan.config)}; the last checkpoint is untouched"
        ) from error


def _newest(plan: StagePlan, ranks: Ranks) -> Path | None:
    """The checkpoint that rank 0 sees; network file systems may show it to others later."""
    found = ranks.gather((socket.gethostname(), plan.run_dir.is_dir(), newest(plan.run_dir)))
    blind = sorted({host for host, sees, _ in found if not sees})
    if blind:
        raise TrainingError(
            f"{', '.join(blind)} does not see {plan.run_dir}: output_dir must be on storage that "
            "all nodes share, mounted at the same place"
        )
    return found[0][2]


def _assemble(
    plan: StagePlan,
    ranks: Ranks,
    resume_from: Path | None,
    restored: TrainState | None,
    report: Report,
) -> StageParts:
    row = RowSize.of(plan.train, plan.job.data)
    check_memory(shape_of(plan.start_model), plan.job, plan.config, row, ranks)
    model_dir = resume_from / checkpoint.MODEL if resume_from else plan.start_model
    model, tokenizer = _load_model(plan, resume_from, ranks), load_tokenizer(model_dir)
    card = read_card(model_dir)
    objective = StageObjective.of(plan.config, plan.seed, card.mask_token_id, plan.own_from)
    if objective.depths:
        card = replace(card, block_size=objective.depths)
    loader = _loader(plan, ranks)
    if restored:
        loader.restore(restored.loader)
    anchor = _load_anchor(plan, ranks) if objective.needs_anchor else None
    step = TrainStep(model, objective.acceptance_weight, anchor)
    flops, own_time = ModelFlops.of(model), OwnTime(ranks)
    engine = make_engine(plan, step, ranks, own_time)

    def write_model(directory: Path) -> None:
        weights = engine.weights()
        if weights is None:
            return
        if plan.config.lora is not None:
            save_file(adapter_weights(weights), directory.with_name(checkpoint.ADAPTERS))
            weights = merged(model, weights)
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
        keeper=_keeper(plan, ranks),
        flops=flops,
        peak_flops=peak_flops(
            ranks, plan.job.cluster.peak_tflops, bfloat16=plan.job.precision == "bfloat16"
        ),
        own_time=own_time,
        watchdog=Watchdog(plan.stacks_dir, ranks.rank, plan.job.cluster.step_timeout_s),
    )


def _keeper(plan: StagePlan, ranks: Ranks) -> Keeper | None:
    with ranks.together():
        if ranks.is_main:
            return Keeper(plan.run_dir, plan.job.checkpoint, plan.stage)
    return None


def make_engine(plan: StagePlan, step: TrainStep, ranks: Ranks, own_time: OwnTime) -> Engine:
    """The engine that the job asks for."""
    optimizer = plan.config.optimizer
    if isinstance(plan.job.engine, DeepSpeedConfig):
        settings = _zero_settings(plan, plan.job.engine, ranks)
        return DeepSpeedEngine(step, optimizer, ranks, settings=settings, own_time=own_time)
    bfloat16 = plan.job.precision == "bfloat16"
    return PlainEngine(step, optimizer, ranks, bfloat16=bfloat16, own_time=own_time)


def _zero_settings(plan: StagePlan, zero: DeepSpeedConfig, ranks: Ranks) -> dict[str, Any]:
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
        with loading_in_parts(_zero_settings(plan, zero, ranks), ranks):
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
    if state.data and state.data != plan.data:
        raise CheckpointError(
            f"{directory} was trained on other conversations than there are now: a file of [data] "
            "has changed, or how it is tokenised (or it was written when mars-ray told data by "
            "their lengths alone). Put it back, or choose another output_dir"
        )
    return state


def _restore_rank(
    parts: StageParts, loop: TrainLoop, directory: Path, restored: TrainState
) -> None:
    """Optimizer, random state and running means of this rank."""
    ranks = parts.ranks
    parts.engine.load_optimizer_state(
        checkpoint.read_rank_state(directory, rank)["optimizer"]
        for rank in range(restored.world_size)
    )
    if restored.world_size == ranks.world_size:
        mine = checkpoint.read_rank_state(directory, ranks.rank)
        load_random_state(mine["random"], ranks.device)
        loop.meter.load(mine["meter"])


def limit_threads(threads: int) -> None:
    """Cap this process's CPU threads; tokenizers would otherwise start their own."""
    torch.set_num_threads(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
