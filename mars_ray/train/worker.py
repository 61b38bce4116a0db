"""A stage on one worker, without Ray: build its parts, restore, train."""

import os
import pickle
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from mars_ray.config.train import DeepSpeedEngine as DeepSpeedConfig
from mars_ray.core.layout import TokenBatch
from mars_ray.data.loader import Loader, eval_batches
from mars_ray.errors import (
    CheckpointError,
    MarsError,
    MemoryShortError,
    NonFiniteLossError,
    TrainingError,
)
from mars_ray.model.shape import shape_of
from mars_ray.train import checkpoint
from mars_ray.train.checkpoint import TrainState, newest
from mars_ray.train.deepspeed import DeepSpeedEngine
from mars_ray.train.engine import Engine, PlainEngine, Step
from mars_ray.train.loop import (
    Report,
    StageOutcome,
    StageParts,
    TrainLoop,
)
from mars_ray.train.memory import RowSize, advice, check_memory
from mars_ray.train.module import draft_module, model_module, stage_zero_settings, with_base_here
from mars_ray.train.plan import StagePlan, identity_hash
from mars_ray.train.ranks import Ranks, Watchdog
from mars_ray.train.retention import CheckpointManager
from mars_ray.train.throughput import RankTimer, peak_flops

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
    again, and would meet it again. (All ranks read the same files, and see the same gradient norm.)
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
        if parts.manager is not None:
            parts.manager.close()
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
    """The newest checkpoint on rank 0; network file systems may show it to others later."""
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
    if plan.config.adapter is not None:
        plan = with_base_here(plan)
    row = RowSize.of(plan.train, plan.job.data)
    check_memory(shape_of(plan.start_model), plan.job, plan.config, row, ranks)
    load = draft_module if plan.config.adapter is not None else model_module
    module = load(plan, ranks, resume_from)
    loader = _loader(plan, ranks)
    if restored:
        loader.restore(restored.loader)
    timer = RankTimer(ranks)
    engine = make_engine(plan, module.step, ranks, timer)

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
        eval_batches=_evaluation(plan, ranks),
        write_model=write_model,
        report=report,
        manager=_manager(plan, ranks),
        flops=module.flops,
        peak_flops=peak_flops(
            ranks, plan.job.cluster.peak_tflops, bfloat16=plan.job.precision == "bfloat16"
        ),
        timer=timer,
        watchdog=Watchdog(plan.stacks_dir, ranks.rank, plan.job.cluster.step_timeout_s),
    )


def _manager(plan: StagePlan, ranks: Ranks) -> CheckpointManager | None:
    with ranks.barrier():
        if ranks.is_main:
            return CheckpointManager(plan.run_dir, plan.job.checkpoint, plan.stage)
    return None


def make_engine(plan: StagePlan, step: Step, ranks: Ranks, timer: RankTimer) -> Engine:
    optimizer = plan.config.optimizer
    if isinstance(plan.job.engine, DeepSpeedConfig):
        settings = stage_zero_settings(plan, plan.job.engine, ranks)
        return DeepSpeedEngine(step, optimizer, ranks, settings=settings, timer=timer)
    bfloat16 = plan.job.precision == "bfloat16"
    return PlainEngine(step, optimizer, ranks, bfloat16=bfloat16, timer=timer)


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
    if plan.eval is None:
        return None
    return partial(
        eval_batches,
        plan.eval,
        micro_batch_size=plan.micro_batch_size(ranks.world_size),
        rank=ranks.rank,
        world_size=ranks.world_size,
        limit=plan.config.eval_rows,
    )


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
    """Restore optimizer, random state and running means of this rank."""
    ranks = parts.ranks
    parts.engine.load_optimizer_state(
        checkpoint.read_rank_state(directory, rank)["optimizer"]
        for rank in range(restored.world_size)
    )
    if restored.world_size == ranks.world_size:
        mine = checkpoint.read_rank_state(directory, ranks.rank)
        checkpoint.load_random_state(mine["random"], ranks.device)
        loop.meter.load(mine["meter"])


def limit_threads(threads: int) -> None:
    """Cap this process's CPU threads; tokenizers would otherwise start their own."""
    torch.set_num_threads(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
