"""Rows of a full step: the job's number, or what the time per token allows."""

import asyncio

import pytest
from serve.asking import load_server

from mars_ray.autoscale.service_model import measured, warning, with_room
from mars_ray.config.decode import EngineConfig
from mars_ray.config.scaling import ScalingConfig, Slo
from mars_ray.config.serve import ServeJob
from mars_ray.core.step_cost import CONTEXT, StepCost
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.serve.replica.llm_server import LLMServer

# 10 ms for up to 64 rows, and 0.15 ms for each row more.
COST = StepCost({1: 0.01, 64: 0.01, 128: 0.02})


@pytest.fixture(scope="module")
def engine(job) -> Engine:
    """With room for any step."""
    engine, _ = load_engine(job.checkpoint, with_room(job.engine))
    return engine


def owed(job: ServeJob, time_per_token_s: float, rows: int | None = None) -> ServeJob:
    scaling = ScalingConfig(slo=Slo(time_per_token_s=time_per_token_s))
    engine = job.engine.model_copy(update={"max_step_tokens": rows})
    return job.model_copy(update={"scaling": scaling, "engine": engine})


@pytest.mark.parametrize(
    ("time_per_token_s", "least", "most"),
    [(0.001, 64, 68), (0.02, 105, 128), (0.1, 500, 700), (10.0, 2048, 2048)],
)
def test_the_rows_are_those_that_the_time_per_token_allows(
    engine, job, time_per_token_s, least, most
):
    """Rows that are free anyway are never fewer, and there is an end where more bring nothing."""
    asked = owed(job, time_per_token_s)
    model = measured(asked, COST.table(asked.engine.max_batch, CONTEXT), engine.card.block_size)
    engine.set_step_tokens(model.step_rows)
    assert warning(asked, model) is None
    assert engine.step_tokens == model.step_rows
    assert least <= engine.step_tokens <= most
    assert engine.snapshot().step_tokens == engine.step_tokens
    assert engine.control is not None
    assert engine.control.most_rows == engine.step_tokens - engine.step_tokens // 8


def test_a_number_of_the_job_stays_and_is_warned_of(job):
    """A step of 1,024 rows takes 160 ms."""
    for time_per_token_s in (0.2, 0.02):
        asked = owed(job, time_per_token_s, 1024)
        assert with_room(asked.engine) == asked.engine
        model = measured(asked, COST.table(asked.engine.max_batch, CONTEXT), 4)
        assert model.step_rows == 1024
        problem = warning(asked, model)
        assert (problem is None) is (time_per_token_s == 0.2)
    assert problem is not None
    assert "engine.max_step_tokens = 1024" in problem
    assert "20 ms" in problem


def test_operators_see_number_and_warning(job):
    """In the status; an engine of nobody's SLO keeps its own default."""
    assert EngineConfig().step_tokens == 512
    engine, tokenizer = load_engine(job.checkpoint, job.engine)
    server = LLMServer(AsyncEngine(engine), tokenizer, job, warning="too many rows")
    server.start()
    status = asyncio.run(server.status())
    server.stop()
    assert (status.step_tokens, status.warning) == (512, "too many rows")
    other = load_server(job)
    other.start()
    (status,) = asyncio.run(other.status())
    other.stop()
    assert status.warning is None
