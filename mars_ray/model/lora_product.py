"""The LoRA of linear layers that share an input, as two products.

The first factors lie side by side, and the second factors are the blocks of one matrix. So queries,
keys and values take two products together.

Shape suffixes: I inputs, O outputs, R rank, K summed rank of the layers, M rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mars_ray.model.draft_adapter import Lora


@dataclass(frozen=True, slots=True)
class LoraProduct:
    """The LoRA of all layers that share an input, as two products."""

    down_IK: Tensor
    up_KO: Tensor

    def inner(self, x_MI: Tensor) -> Tensor:
        """The first product, (M, K)."""
        return torch.mm(x_MI, self.down_IK)

    def as_of(self, device: torch.device, dtype: torch.dtype) -> "LoraProduct":
        """The same on a device, in a dtype."""
        return LoraProduct(self.down_IK.to(device, dtype), self.up_KO.to(device, dtype))


def side_by_side(
    layers: Sequence[Lora | None], outputs: Sequence[int], scale: float
) -> LoraProduct | None:
    """The product of layers with so many outputs; layers without LoRA add no inner size."""
    known = [layer for layer in layers if layer]
    if not known:
        return None
    dtype = known[0].up_OR.dtype
    ups = [
        layer.up_OR * scale if layer else torch.zeros(size, 0, dtype=dtype)
        for layer, size in zip(layers, outputs, strict=True)
    ]
    down_IK = torch.cat([layer.down_RI for layer in known]).t().contiguous()
    return LoraProduct(down_IK, torch.block_diag(*ups).t().contiguous())
