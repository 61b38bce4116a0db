"""From a job to a client of its engine: ours in a thread of this process, or vLLM's."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mars_ray.config.decode import EngineConfig
from mars_ray.config.serve import ServeJob
from mars_ray.config.vllm_engine import VllmConfig
from mars_ray.core.step_cost import CONTEXT
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.loading import load_engine
from mars_ray.model.places import adapter_name, local_adapter, local_copy
from mars_ray.serve.replica.engine_client import EngineClient
from mars_ray.serve.step_tokens import measured, warning, with_room
from mars_ray.storage.place import Place


@dataclass(frozen=True, slots=True)
class Running:
    """The client of an engine that runs, and what belongs to it."""

    client: EngineClient
    tokenizer: PreTrainedTokenizerBase
    warning: str | None  # what is wrong with the job's size of a step


async def running_engine(job: ServeJob) -> Running:
    """The engine of a job's one model, warmed up. Raises ConfigError and ModelError."""
    checkpoint = local_copy(Place(job.checkpoint, job.revision), job.model_cache)
    if isinstance(job.engine, VllmConfig):
        return await _vllm(job, job.engine, checkpoint)
    return _in_process(job, job.engine, checkpoint)


def _in_process(job: ServeJob, config: EngineConfig, checkpoint: Path) -> Running:
    engine, tokenizer = load_engine(checkpoint, _fetched(with_room(config), job.model_cache))
    if config.draft_adapter:
        directory = local_adapter(config.draft_adapter, job.model_cache)
        engine.adapter_name = adapter_name(config.draft_adapter, directory)
    assert engine.cost is not None, "the engine is not warmed up"
    model = measured(job, engine.cost.table(config.max_batch, CONTEXT), engine.card.block_size)
    engine.set_step_tokens(model.step_rows)
    problem = warning(job, model)
    _tell(job, str(engine.info), engine.step_tokens, problem)
    client = AsyncEngine(engine, checkpoint)
    client.start()
    return Running(client, tokenizer, problem)


async def _vllm(job: ServeJob, config: VllmConfig, checkpoint: Path) -> Running:
    # Only here, because other processes, and most replicas, have no vLLM.
    from mars_ray.serve.replica.vllm_loading import load_vllm

    executor = "ray" if config.workers > 1 and job.gpus_per_replica else None
    place = config.draft_adapter
    if place:
        directory = local_adapter(place, job.model_cache)
        config = config.model_copy(update={"draft_adapter": str(directory)})
    client, tokenizer = await load_vllm(checkpoint, config, executor)
    if place and config.draft_adapter:
        client.adapter_name = adapter_name(place, Path(config.draft_adapter))
    seen = await client.snapshot()
    problem = warning(job, measured(job, seen.step_cost, client.depths))
    _tell(job, str(seen.info), config.max_step_tokens, problem)
    return Running(client, tokenizer, problem)


def _fetched(engine: EngineConfig, cache: str) -> EngineConfig:
    """The engine's configuration with its other models fetched."""
    changes: Mapping[str, str] = {}
    if engine.draft_adapter:
        changes |= {"draft_adapter": str(local_adapter(engine.draft_adapter, cache))}
    return engine.model_copy(update=changes)


def _tell(job: ServeJob, info: str, step_tokens: int, problem: str | None) -> None:
    """The first lines of this process's log state the engine that runs here."""
    print(f"{job.name}: {info}, steps of {step_tokens} rows", flush=True)
    if problem:
        print(f"{job.name}: warning: {problem}", flush=True)
