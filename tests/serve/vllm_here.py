"""Whether this environment has vLLM, and how its processes are kept small."""

from importlib.util import find_spec

import pytest

from mars_ray.config.vllm import VllmConfig

HAS_VLLM = find_spec("vllm") is not None and find_spec("vllm.v1") is not None
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed here: `make test-vllm`"),
]
# Engines of two cores' tests: no core is reserved, no thread is bound to one.
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
SMALL = VllmConfig(
    type="vllm",
    max_batch=4,
    max_context=300,
    dtype="float32",
    cache_bytes=16_000_000,
    args={"enforce_eager": True},  # nothing to compile
)
