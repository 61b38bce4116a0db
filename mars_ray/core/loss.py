"""The loss as sums and counts, with a single division after everything has been counted.

    L = sum(weight * CE over noisy rows) / sum(weight of noisy rows)
      + ar_weight * sum(CE over clean rows) / number of clean rows

Sums and counts run over all ranks and micro-batches of a step. Counts depend on the layout alone,
so they are known and reduced before the first forward, which then has each row's final coefficient.

Shape suffixes: B batch, R rows of a layout, N rows with a target, M noisy rows, A anchored rows,
C rows of a chunk, H hidden size, V vocabulary. A draft adapter's losses: `draft_loss.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mars_ray.core.layout import Layout


def loss_counts(layout: Layout) -> Tensor:
    """Number of clean rows with a target, summed weight of noisy rows, float64 (2,); additive."""
    weight_BR = layout.weight_BR.double()
    noisy = (weight_BR * layout.is_noisy_BR).sum()
    return torch.stack([weight_BR.sum() - noisy, noisy])


def row_coefficients(layout: Layout, counts: Tensor, ar_weight: float) -> Tensor:
    """Factor of each row's cross-entropy in the loss, float32 (B, R).

    `counts` are the global ones; a stream that is empty everywhere gets coefficient 0.
    """
    clean_count, noisy_count = counts.clamp_min(1e-9).tolist()
    scale_BR = torch.where(layout.is_noisy_BR, 1.0 / noisy_count, ar_weight / clean_count)
    return torch.where(layout.weight_BR > 0, layout.weight_BR * scale_BR, 0.0)


class WeightedCrossEntropy(torch.autograd.Function):
    """Output head and `sum(coefficient * CE)` in chunks of rows, with their gradients at once.

    The coefficients are final before the forward, so loss and gradient use a chunk's logits at the
    same time. These are not kept for the backward pass, nor computed again, as autograd would with
    a fourth product with the head. At 150,000 tokens 1,024 rows' float32 logits take 0.6 GB.
    (The idea is that of Liger's fused linear cross-entropy, arXiv 2410.10989.)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor,
        coefficient_N: Tensor,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        """The loss, float32 (), and each row's cross-entropy, float32 (N,), without a gradient."""
        hidden_type, weight_type = hidden_NH.dtype, weight_VH.dtype
        device = hidden_NH.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden_NH, weight_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
        ce_N = torch.empty(target_N.shape, dtype=torch.float32, device=hidden_NH.device)
        grad_NH = torch.empty_like(hidden_NH)
        grad_VH = torch.empty_like(weight_VH) if ctx.needs_input_grad[1] else None
        with torch.autocast(device, enabled=False):
            # Without rows there is one empty chunk, so that the gradient is zero and not None.
            for start in range(0, max(1, len(target_N)), chunk_rows):
                rows = slice(start, start + chunk_rows)
                chunk = hidden_NH[rows], target_N[rows], coefficient_N[rows]
                ce_N[rows], slope_CV = _slope(weight_VH, *chunk)
                torch.mm(slope_CV, weight_VH, out=grad_NH[rows])
                if grad_VH is not None:
                    kept = 0 if start == 0 else 1
                    grad_VH.addmm_(slope_CV.t(), hidden_NH[rows], beta=kept)
        ctx.save_for_backward(
            grad_NH.to(hidden_type), None if grad_VH is None else grad_VH.to(weight_type)
        )
        ctx.mark_non_differentiable(ce_N)
        return (coefficient_N * ce_N).sum(), ce_N

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradients that the forward has computed, times the gradient of the loss."""
        grad_NH, grad_VH = ctx.saved_tensors
        # In place: the weight's gradient may take half a gigabyte.
        for gradient in (grad_NH, grad_VH):
            if gradient is not None:
                gradient.mul_(grad)
        return grad_NH, grad_VH, None, None, None


def cross_entropies(
    head: Callable[[Tensor], Tensor], hidden_NH: Tensor, target_N: Tensor, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """Each row's cross-entropy, float32 (N,), and likeliest token, (N,), without a gradient."""
    ce, predicted = [], []
    for rows_NH, target in zip(
        hidden_NH.split(chunk_rows), target_N.split(chunk_rows), strict=True
    ):
        logits_NV = head(rows_NH).float()
        ce.append(nn.functional.cross_entropy(logits_NV, target, reduction="none"))
        predicted.append(logits_NV.argmax(dim=-1))
    return torch.cat(ce), torch.cat(predicted)


def divergence(
    head: nn.Module, anchor_head: nn.Module, hidden_AH: Tensor, theirs_AH: Tensor
) -> Tensor:
    """KL(starting model || model) of anchored rows, float32 (A,)."""
    log_q_AV = head(hidden_AH).float().log_softmax(dim=-1)
    with torch.no_grad():
        log_p_AV = anchor_head(theirs_AH).float().log_softmax(dim=-1)
    return nn.functional.kl_div(log_q_AV, log_p_AV, reduction="none", log_target=True).sum(dim=-1)


def stream_sums(layout: Layout, wanted_BR: Tensor, ce_N: Tensor) -> Tensor:
    """`weight * CE` summed over clean and over noisy rows, float64 (2,); `wanted_BR` marks the rows
    with a target."""
    weighted_N = (layout.weight_BR[wanted_BR] * ce_N).double()
    noisy_N = layout.is_noisy_BR[wanted_BR]
    return torch.stack([weighted_N[~noisy_N].sum(), weighted_N[noisy_N].sum()])


def acceptance_weights(ce_M: Tensor, depth_M: Tensor) -> Tensor:
    """What a noisy row's log-probability adds to the expected accepted length, float64 (M,).

    Let p_d be the probability of the right token at depth d. A block's expected accepted tokens are
    E = p_1 + p_1 p_2 + ...; dE / d log p_d is the sum of the products that hold p_d. So a shallow
    row counts for all rows behind it, and a row behind a hopeless one counts little. Without the
    scaling to mean 1, a model that accepts nothing yet learns next to nothing (docs/log.md). Blocks
    follow each other, each in rising depth from 1.
    """
    first = (depth_M == 1).nonzero().squeeze(1)
    block_M = (depth_M == 1).cumsum(0) - 1
    last = torch.cat([first[1:], first.new_tensor([len(depth_M)])]) - 1
    total_M = ce_M.double().cumsum(0)
    before = total_M[first] - ce_M.double()[first]
    survival_M = (before[block_M] - total_M).exp()
    sum_M = survival_M.cumsum(0)
    tail_M = sum_M[last][block_M] - sum_M + survival_M
    return tail_M / tail_M.mean()


def _slope(
    weight_VH: Tensor, hidden_CH: Tensor, target_C: Tensor, coefficient_C: Tensor
) -> tuple[Tensor, Tensor]:
    """A chunk's cross-entropy, and the loss's gradient by its logits: coefficient (p - onehot)."""
    logits_CV = (hidden_CH @ weight_VH.t()).float()
    log_sum_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
    target_C1 = target_C.unsqueeze(-1)
    ce_C1 = log_sum_C1 - logits_CV.gather(1, target_C1)
    slope_CV = logits_CV.sub_(log_sum_C1).exp_()
    slope_CV.scatter_add_(1, target_C1, torch.full_like(ce_C1, -1.0))
    slope_CV.mul_(coefficient_C.unsqueeze(-1))
    return ce_C1.squeeze(-1), slope_CV.to(hidden_CH.dtype)
