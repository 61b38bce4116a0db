"""Linear layers over a checkpoint's weights: torch's product, or oneDNN's over reordered weights.

A step of few rows waits for weights. On a CPU, oneDNN reads large weights twice as fast when they
lie in its own blocks (numbers: docs/log.md). It also multiplies a row in the same way however many
there are, so its result does not depend on the batch. Small weights do not justify the longer call.

Shape suffixes: N rows, I inputs, O outputs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mars_ray.model.load import multiplies_bfloat16

# The number of weights from which a matrix is worth reordering.
_LARGE = 1 << 17
# The blocks that oneDNN chooses for this many rows also suit fewer and more rows.
_USUAL_ROWS = 16


def linear_of(modules: list[nn.Linear], keep: Tensor) -> "Linear | ReorderedLinear":
    """Linear layers with the same input, joined into one; all have biases or none has.

    Their weights become views of the joined one, or are released: the modules are then empty,
    except one whose weight is `keep`.
    """
    weight_OI = _joined([module.weight for module in modules])
    biases = [module.bias for module in modules if module.bias is not None]
    bias_O = _joined(biases) if biases else None
    if not _is_reorderable(weight_OI):
        return Linear(weight_OI.t(), bias_O)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _USUAL_ROWS)
    for module in modules:
        if module.weight is not keep:
            module.weight.data = weight_OI.new_empty(0)
    return ReorderedLinear(reordered, bias_O)


@dataclass(frozen=True, slots=True)
class Linear:
    """A product with the weight transposed, which suits matrix products."""

    weight_IO: Tensor
    bias_O: Tensor | None

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self.bias_O is None:
            return torch.mm(x_NI, self.weight_IO)
        return torch.addmm(self.bias_O, x_NI, self.weight_IO)

    def add_to(self, residual_NO: Tensor, x_NI: Tensor) -> Tensor:
        """The product and the residual connection in one operation."""
        sum_NO = torch.addmm(residual_NO, x_NI, self.weight_IO)
        return sum_NO if self.bias_O is None else sum_NO.add_(self.bias_O)

    def dense(self) -> Tensor:
        """The weight, (O, I)."""
        return self.weight_IO.t()


@dataclass(frozen=True, slots=True)
class ReorderedLinear:
    """A product with the weight in oneDNN's blocks.

    The operations are those that torch.compile generates for frozen weights.
    """

    weight: Any  # opaque
    bias_O: Tensor | None

    def __call__(self, x_NI: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_NI, self.weight, self.bias_O, "none", [], "")

    def add_to(self, residual_NO: Tensor, x_NI: Tensor) -> Tensor:
        """The product and the residual connection in one operation."""
        return torch.ops.mkldnn._linear_pointwise.binary(
            x_NI, residual_NO, self.weight, self.bias_O, "add"
        )

    def dense(self) -> Tensor:
        """A copy of the weight in its usual order, (O, I)."""
        return self.weight.to_dense()


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """One tensor of all rows; the parts become views of it."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0].detach()
    whole = torch.cat(parts)
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole


def _is_reorderable(weight_OI: Tensor) -> bool:
    if weight_OI.device.type != "cpu" or weight_OI.numel() < _LARGE:
        return False
    if not (
        torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return False
    return weight_OI.dtype == torch.float32 or (
        weight_OI.dtype == torch.bfloat16 and multiplies_bfloat16()
    )
