"""What the engine asks of a form of attention; what the runner asks stands there.

Shape suffixes: N rows of a forward, Z hidden size.
"""

from typing import Protocol

import numpy as np
from torch import Tensor

from mars_ray.decode.adapter import FusedAdapter
from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.fused_model import FusedModel
from mars_ray.decode.kv_cache import PagedCache


class Backend(Protocol):
    """Runs a forward's rows through the model."""

    name: str  # as `attention_backend` has it
    runner: FusedModel
    cache: PagedCache

    def warm_up(self) -> None:
        """Whatever would make a first step slow. Overwrites the first pages of the cache."""
        ...

    def set_adapter(self, adapter: FusedAdapter | None) -> None:
        """Masks are the adapter's from the next forward on."""
        ...

    def hidden_states(self, tables: Tables, ids_N: np.ndarray, position_N: np.ndarray) -> Tensor:
        """Last hidden states, (N, Z), valid until the next call."""
        ...
