"""The interface of an attention backend, and the choice of one for a device.

Shape suffixes: N rows of a forward, Z hidden size.
"""

from typing import Protocol

import numpy as np
from torch import Tensor

from mars_ray.config.decode import EngineConfig
from mars_ray.decode.adapter import FusedAdapter
from mars_ray.decode.attention.dense import DenseBackend
from mars_ray.decode.attention.paged import PagedBackend, missing
from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.fused_model import FusedModel
from mars_ray.decode.kv_cache import PagedCache
from mars_ray.errors import ConfigError


class Backend(Protocol):
    """Runs a forward's rows through the model."""

    name: str  # as in `attention_backend`
    runner: FusedModel
    cache: PagedCache

    def warm_up(self) -> None:
        """Do in advance what would slow a first step. Overwrites the first pages of the cache."""
        ...

    def set_adapter(self, adapter: FusedAdapter | None) -> None:
        """Set the adapter for masks from the next forward on."""
        ...

    def hidden_states(self, tables: Tables, ids_N: np.ndarray, position_N: np.ndarray) -> Tensor:
        """Last hidden states, (N, Z), valid until the next call."""
        ...


def backend_of(
    config: EngineConfig, runner: FusedModel, cache: PagedCache, positions: int
) -> Backend:
    """The attention backend that the configuration asks for, or the device's default.

    For sequences of at most `positions`. Raises ConfigError if the kernels cannot run the model.
    """
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
