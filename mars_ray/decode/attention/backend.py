"""The interface of a backend, and the choice of one for a device.

Shape suffixes: N rows of a forward, P rows that are read, X rows of the draft head, C candidates,
H hidden size, V vocabulary.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.config.decode import EngineConfig
from mars_ray.decode.adapter import FusedAdapter
from mars_ray.decode.attention.dense import DenseBackend
from mars_ray.decode.attention.paged import PagedBackend, missing
from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.cpu.backend import CompiledBackend, CompiledModel, check
from mars_ray.decode.cpu.compiling import NoLibraryError
from mars_ray.decode.fused_model import FusedModel
from mars_ray.decode.kv_cache import PagedCache
from mars_ray.decode.logits import Block
from mars_ray.decode.strategies import Masks
from mars_ray.errors import ConfigError

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """Runs a forward's rows through the model; results are kept until the next forward. `name` is
    as in `attention_backend`."""

    name: str
    instructions: str | None  # the instruction set of the compiled step
    cache: PagedCache
    device: torch.device
    dtype: torch.dtype

    @property
    def adapter(self) -> FusedAdapter | None:
        """The adapter for masks, if there is one."""
        ...

    @property
    def seconds(self) -> float:
        """Time spent in the model so far; on a GPU, in launching it and waiting for its results."""
        ...

    def warm_up(self) -> None:
        """Do in advance what would slow a first step. Overwrites the first pages of the cache."""
        ...

    def set_adapter(self, adapter: FusedAdapter | None) -> None:
        """Set the adapter for masks from the next forward on."""
        ...

    def forward(self, tables: Tables, ids_N: np.ndarray, position_N: np.ndarray) -> None:
        """Run the rows through the model. With an adapter, the ids of masks are their depths, from
        0. The compiled step raises EngineError if results are not finite; elsewhere the sampler
        does, of the rows that it reads."""
        ...

    def hidden(self, rows: Sequence[int]) -> Tensor:
        """Last hidden states of some rows, in increasing order, (P, H)."""
        ...

    def logits(self, rows: Sequence[int]) -> Tensor:
        """Logits of some rows, in increasing order, float32 (P, V)."""
        ...

    def embed(self, ids_X: Tensor) -> Tensor:
        """Embeddings of tokens, (X, H)."""
        ...

    def candidate_logits(self, hidden_XH: Tensor, candidate_XC: Tensor) -> Tensor:
        """Logits of each row's candidates only, float32 (X, C)."""
        ...

    def choose(
        self,
        logits_PV: Tensor,
        blocks: Sequence[Block],
        position_P: np.ndarray,
        draft_P: np.ndarray,
        parent_P: np.ndarray,
    ) -> tuple[Tensor, Tensor]:
        """Each row's token, NOT_A_NUMBER where there is none, and each draft's probability relative
        to that of the token of its parent's row. Logits may be overwritten; `position_P` holds the
        predicted tokens' positions."""
        ...

    def drafts(
        self, masks: Sequence[Masks], rows: Sequence[int], logits_MV: Tensor, position_M: np.ndarray
    ) -> tuple[Sequence[list[int]], Sequence[list[float]]] | None:
        """Each branch's tokens by the adapter's head, and their shares among the candidates; None
        if this backend cannot choose these drafts. `rows` are those of `logits_MV`."""
        ...


def runner_of(
    model: PreTrainedModel, config: EngineConfig, positions: int, release: bool
) -> CompiledModel | FusedModel:
    """The model's weights as the configuration's backend has them, for sequences of at most
    `positions`. With `release` the model is emptied where they are copied.

    Raises ConfigError if the compiled step is asked for and cannot run the model, and ModelError.
    """
    kind, is_asked = config.attention_backend, config.attention_backend == "compiled"
    if kind not in ("auto", "compiled") or (model.device.type != "cpu" and not is_asked):
        return FusedModel(model, positions)
    try:
        check(config.cpu_instructions)
        return CompiledModel(model, positions, config.cpu_instructions, config.threads, release)
    except NoLibraryError as error:
        if is_asked:
            raise ConfigError(f"attention_backend='compiled': {error}") from error
        logger.warning("steps run in torch, two to three times slower, as %s", error)
        return FusedModel(model, positions)


def backend_of(
    config: EngineConfig, runner: CompiledModel | FusedModel, cache: PagedCache, positions: int
) -> Backend:
    """The backend that the configuration asks for, or the device's default.

    For sequences of at most `positions`. Raises ConfigError if the kernels cannot run the model.
    """
    if isinstance(runner, CompiledModel):
        return CompiledBackend(runner, cache)
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
