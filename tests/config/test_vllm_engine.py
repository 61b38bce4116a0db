"""vLLM as a service's engine, as far as a job file tells."""

import pytest

from mars_ray.config.decode import EngineConfig
from mars_ray.config.load import parse_job
from mars_ray.config.serve import ServeJob
from mars_ray.config.vllm import VllmConfig
from mars_ray.errors import ConfigError


def job(engine: dict, **fields) -> ServeJob:
    table = {"kind": "serve", "checkpoint": "any", "engine": engine} | fields
    parsed = parse_job(table, source="job.toml")
    assert isinstance(parsed, ServeJob)
    return parsed


def test_the_type_chooses_the_engine():
    """Guards jobs from before there were two: without a type the engine is the embedded one."""
    assert job({}).engine == job({"type": "mars"}).engine == EngineConfig()
    assert job({"type": "vllm"}).engine == VllmConfig()
    for given in ({"max_batch": 3}, {"type": "vllm", "tensor_parallel_size": 2}):
        asked = job(given)
        assert ServeJob.model_validate_json(asked.model_dump_json()) == asked


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        ({"type": "sglang"}, "type must be 'mars' or 'vllm'"),
        ({"type": "vllm", "max_bach": 3}, "did you mean 'engine.max_batch'"),
        ({"type": "vllm", "attention_backend": "triton"}, "unknown key 'engine.attention_backend'"),
        ({"type": "vllm", "args": {"max_model_len": 9}}, "max_context"),
        ({"type": "vllm", "args": {"dtype": "auto"}}, "write engine.dtype"),
        ({"type": "vllm", "args": {"disable_log_stats": True}}, "leave it out"),
        ({"type": "vllm", "args": {"enable_lora": True}}, "no effect"),
        ({"type": "vllm", "args": {"additional_config": {"mars": {}}}}, "own fields"),
        ({"type": "vllm", "max_batch": 64, "max_step_tokens": 32}, "less than max_batch"),
        ({"type": "vllm", "pipeline_parallel_size": 2, "masks": 4}, "use tensor_parallel_size"),
        ({"type": "vllm", "cache_bytes": 9, "gpu_memory_utilization": 0.5}, "one of them"),
    ],
)
def test_what_would_have_no_effect_is_refused(engine, complaint):
    """Guards two settings for one thing, and those of the other engine."""
    with pytest.raises(ConfigError, match=complaint):
        job(engine)


def test_arguments_that_vllm_does_not_have_are_refused_with_the_nearest():
    """Guards a misspelled argument that a replica would start without."""
    config = VllmConfig(args={"enforce_eagr": True})
    with pytest.raises(ValueError, match=r"enforce_eagr.*vLLM 9 .*'enforce_eager'"):
        config.check_names(["enforce_eager", "seed"], "9")
    VllmConfig(args={"seed": 1}).check_names(["enforce_eager", "seed"], "9")


@pytest.mark.parametrize(
    ("mode", "complaint"),
    [
        ({"type": "confidence"}, "not 'confidence': use one"),
        ({"type": "jacobi"}, "not 'jacobi'"),
        ({"type": "verified", "groups": 2, "window": 3}, "window and groups"),
    ],
)
def test_a_default_mode_that_vllm_does_not_decode_is_refused(mode, complaint):
    """Guards a service whose every request is refused."""
    with pytest.raises(ConfigError, match=complaint):
        job({"type": "vllm"}, default_mode=mode)
    job({"type": "vllm"}, default_mode={"type": "exact"})
    job({"type": "mars"}, default_mode=mode)


def test_each_worker_has_a_gpu_or_none_has():
    """Guards replicas that Ray places with fewer GPUs than vLLM's workers look for."""
    split = {"type": "vllm", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert job(split, gpus_per_replica=4).engine.workers == 4
    assert job(split).gpus_per_replica is None
    with pytest.raises(ConfigError, match="write 4"):
        job(split, gpus_per_replica=1)
    with pytest.raises(ConfigError, match="max_replicas_per_node"):
        job(split, gpus_per_replica=4, max_replicas_per_node=1)
