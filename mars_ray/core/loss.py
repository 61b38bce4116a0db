"""The loss as sums and counts, with one division after everything has been counted.

    L = sum(weight * CE over noisy rows) / sum(weight of noisy rows)
      + ar_weight * sum(CE over clean rows) / number of clean rows

Sums and counts run over all ranks and micro-batches of a step. Counts depend on the layout alone,
so they are known, and reduced, before the first forward; each row then has its final coefficient.

Shape suffixes: B batch, R rows of a layout, N rows with a target, H hidden size.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mars_ray.core.layout import Layout


def loss_counts(layout: Layout) -> Tensor:
    """Clean rows with a target and summed weight of noisy rows, float64 (2,). Additive."""
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


def cross_entropy_rows(
    head: Callable[[Tensor], Tensor], hidden_NH: Tensor, target_N: Tensor, chunk_rows: int
) -> Tensor:
    """Cross-entropy of each row, float32 (N,).

    More than `chunk_rows` rows go through head and loss in chunks whose logits are thrown away and
    computed again in the backward pass: at 150,000 tokens the float32 logits of 1,024 rows take
    0.6 GB, which is what would otherwise bound the batch.
    """
    if hidden_NH.shape[0] <= chunk_rows:
        return _cross_entropy(head, hidden_NH, target_N)
    parts = [
        checkpoint(_cross_entropy, head, rows_NH, target, use_reentrant=False)
        for rows_NH, target in zip(
            hidden_NH.split(chunk_rows), target_N.split(chunk_rows), strict=True
        )
    ]
    return torch.cat(parts)


def _cross_entropy(head: Callable[[Tensor], Tensor], hidden_NH: Tensor, target_N: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(head(hidden_NH).float(), target_N, reduction="none")
