"""Which form of attention a device gets."""

from mars_ray.config.decode import EngineConfig
from mars_ray.decode.attention.base import Backend
from mars_ray.decode.attention.dense import DenseBackend
from mars_ray.decode.attention.paged import PagedBackend, missing
from mars_ray.decode.fused_model import FusedModel
from mars_ray.decode.kv_cache import PagedCache
from mars_ray.errors import ConfigError


def backend_of(
    config: EngineConfig, runner: FusedModel, cache: PagedCache, positions: int
) -> Backend:
    """For sequences of at most so many positions. Raises ConfigError."""
    kind, reason = config.attention_backend, missing(cache)
    if kind == "triton" and reason:
        raise ConfigError(
            f"attention_backend='triton' cannot run this model: {reason}. "
            "Set attention_backend='dense'"
        )
    wants_kernels = kind == "triton" or (kind == "auto" and runner.device.type == "cuda")
    if wants_kernels and not reason:
        rows, sequences = config.max_step_tokens, config.max_batch
        return PagedBackend(runner, cache, rows, sequences, positions)
    return DenseBackend(runner, cache)
