"""The choice of a backend for a device."""

import logging

from transformers import PreTrainedModel

from mars_ray.config.decode import EngineConfig
from mars_ray.decode.attention.dense import DenseBackend
from mars_ray.decode.attention.paged import PagedBackend, missing
from mars_ray.decode.cpu.backend import CompiledBackend, check
from mars_ray.decode.cpu.compiling import NoLibraryError
from mars_ray.decode.fused_model import FusedModel
from mars_ray.decode.kv_cache import PagedCache
from mars_ray.errors import ConfigError

logger = logging.getLogger(__name__)


# Runs a forward's rows through the model; results are kept until the next forward.
Backend = CompiledBackend | DenseBackend | PagedBackend


def runner_of(
    model: PreTrainedModel, config: EngineConfig, positions: int, release: bool
) -> CompiledBackend | FusedModel:
    """The model's weights as the configuration's backend has them, for sequences of at most
    `positions`. With `release` the model is emptied where they are copied.

    Raises ConfigError if the compiled step is asked for and cannot run the model, and ModelError.
    """
    kind, is_asked = config.attention_backend, config.attention_backend == "compiled"
    if kind not in ("auto", "compiled") or (model.device.type != "cpu" and not is_asked):
        return FusedModel(model, positions)
    try:
        check(config.cpu_instructions)
        return CompiledBackend(model, positions, config.cpu_instructions, config.threads, release)
    except NoLibraryError as error:
        if is_asked:
            raise ConfigError(f"attention_backend='compiled': {error}") from error
        logger.warning("steps run in torch, two to three times slower, as %s", error)
        return FusedModel(model, positions)


def backend_of(
    config: EngineConfig, runner: CompiledBackend | FusedModel, cache: PagedCache, positions: int
) -> Backend:
    """The backend that the configuration asks for, or the device's default.

    For sequences of at most `positions`. Raises ConfigError if the kernels cannot run the model.
    """
    if isinstance(runner, CompiledBackend):
        runner.cache = cache
        return runner
    kind, reason = config.attention_backend, missing(cache)
    if kind == "triton" and reason:
        raise ConfigError(
            f"attention_backend='triton' cannot run this model: {reason}. "
            "Set attention_backend='dense'"
        )
    wants_kernels = kind == "triton" or (kind == "auto" and runner.device.type == "cuda")
    if wants_kernels and not reason:
        rows, sequences = config.step_tokens, config.max_batch
        return PagedBackend(runner, cache, rows, sequences, positions)
    return DenseBackend(runner, cache)
