"""Rows of a full step in a service: the job's number, or as many as the SLO's time per token
allows.

The law is `service_model.step_rows`. A replica applies it to the step costs that it has measured
at its start, the policy to those that replicas report, or to the job's service model until then.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from mars_ray.autoscale.service_model import ServiceModel, contradiction, prior_model, step_rows
from mars_ray.config.decode import EngineConfig
from mars_ray.config.serve import ServeJob
from mars_ray.config.vllm_engine import ServedEngine, VllmConfig

Engine = TypeVar("Engine", bound=EngineConfig | VllmConfig)
# Most rows that are chosen. Each row more saves little by then, and its activations need memory.
_MOST_ROWS = 2048


def with_room(engine: Engine) -> Engine:
    """The configuration of an engine whose steps can have any size that may be chosen."""
    rows = engine.max_step_tokens or _MOST_ROWS
    return engine.model_copy(update={"max_step_tokens": rows})


def sized(model: ServiceModel, engine: ServedEngine, time_per_token_s: float) -> ServiceModel:
    """The service model for steps and batches of this engine."""
    rows = engine.max_step_tokens
    if rows is None:
        rows = min(step_rows(model, time_per_token_s), with_room(engine).step_tokens)
    return replace(model, max_batch=engine.max_batch, step_rows=rows)


def measured(job: ServeJob, step_cost: Mapping[int, float], depth: int) -> ServiceModel:
    """The service model of a replica whose steps of so many rows take so long, with `depth`
    masks."""
    model = replace(
        prior_model(job.name, None, depth, job.engine.max_batch),
        seconds_at=tuple(step_cost.items()),
    )
    return sized(model, job.engine, job.scaling.slo.time_per_token_s)


def warning(job: ServeJob, model: ServiceModel) -> str | None:
    """What is wrong with the job's own number, if it has one that contradicts its SLO."""
    rows = job.engine.max_step_tokens
    if rows is None:
        return None
    problem = contradiction(model, rows, job.scaling.slo.time_per_token_s)
    if problem is None:
        return None
    # vLLM's steps have their size before any of them is measured.
    remedy = ", or leave the number out to have it chosen" if job.engine.type == "mars" else ""
    return f"engine.max_step_tokens = {rows}: {problem}{remedy}"
