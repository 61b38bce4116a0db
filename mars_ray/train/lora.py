"""LoRA on linear layers that share an input: one product down, and one up for each of them.

Shape suffixes: N rows, I inputs, O outputs of all layers, P outputs of one, R rank, S sum of the
ranks of all layers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear


class LoraGroup(NamedTuple):
    """LoRA weights of a group's layers; `places` are the layers' rows in the joined weight."""

    down_SI: Tensor
    ups_PR: tuple[Tensor, ...]
    places: tuple[slice, ...]


def with_lora(
    x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, group: LoraGroup, scale: float
) -> Tensor:
    """`W x + b + scale * up(down(x))`, in the dtype of x; the adapter's weights may be float32."""
    return _LoraProduct.apply(
        x_NI, weight_OI, bias_O, group.places, scale, group.down_SI, *group.ups_PR
    )


class _LoraProduct(torch.autograd.Function):
    """Product with a hand-written backward: no gradient of the frozen weight, sums in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        places: tuple[slice, ...],
        scale: float,
        down_SI: Tensor,
        *ups_PR: Tensor,
    ) -> Tensor:
        down = down_SI.to(x_NI.dtype)
        ups = [up.to(x_NI.dtype) for up in ups_PR]
        inner_NS = linear(x_NI, down)
        out_NO = linear(x_NI, weight_OI, bias_O)
        for place, up, inner in zip(places, ups, _each(inner_NS, ups), strict=True):
            out_NO[:, place].addmm_(inner, up.t(), alpha=scale)
        ctx.save_for_backward(x_NI, weight_OI, inner_NS, down, *ups)
        ctx.places, ctx.scale, ctx.types = places, scale, [w.dtype for w in (down_SI, *ups_PR)]
        return out_NO

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_NI, weight_OI, inner_NS, down, *ups = ctx.saved_tensors
        grad_inner_NS = torch.empty_like(inner_NS)
        grad_ups = []
        for place, up, inner, grad_inner in zip(
            ctx.places, ups, _each(inner_NS, ups), _each(grad_inner_NS, ups), strict=True
        ):
            grad_NP = grad_NO[:, place]
            grad_inner.copy_(grad_NP @ up).mul_(ctx.scale)
            grad_ups.append((grad_NP.t() @ inner).mul_(ctx.scale))
        grad_NI = (grad_NO @ weight_OI).addmm_(grad_inner_NS, down)
        grads = [grad_inner_NS.t() @ x_NI, *grad_ups]
        trained = (grad.to(dtype) for grad, dtype in zip(grads, ctx.types, strict=True))
        return grad_NI, None, None, None, None, *trained


def _each(inner_NS: Tensor, ups: list[Tensor]) -> tuple[Tensor, ...]:
    """The columns of each layer, as many as its rank."""
    return inner_NS.split([up.shape[1] for up in ups], dim=1)
