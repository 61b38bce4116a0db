"""Evaluation during training: held-out losses and teacher-forced acceptance.

The same blocks are masked each time, those of the schedule's end, so evaluations can be compared.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from mars_ray.core.acceptance import acceptance_counts, expected_tokens_per_forward, survival
from mars_ray.core.layout import TokenBatch
from mars_ray.core.loss import loss_counts
from mars_ray.train.engine import Engine
from mars_ray.train.objective import StageObjective
from mars_ray.train.ranks import Ranks

_EVAL_PROGRESS = 1.0


def evaluate(
    engine: Engine, objective: StageObjective, batches: Iterable[TokenBatch], ranks: Ranks
) -> dict[str, float]:
    """Metrics over all ranks' batches, the same on every rank; collective.

    Every rank must bring as many batches: under ZeRO-3 each forward is a collective too.
    """
    # All held-out conversations are data, whatever their index.
    objective = replace(objective, own_from=None)
    depths, predictors = objective.depths, objective.predictors
    totals = torch.zeros(4, dtype=torch.float64)  # two sums, then what they are divided by
    # By predictor: blocks reached and agreed by depth.
    counts = torch.zeros(len(predictors), 2, depths, dtype=torch.float64)
    for batch in batches:
        layout = objective.layout(batch, _EVAL_PROGRESS)
        sums, predicted = engine.predict(layout)
        totals[:2] += sums.cpu()
        totals[2:] += loss_counts(layout)
        if depths:
            by_predictor = predicted.cpu().view(-1, *layout.target_BR.shape)
            for index, predicted_BR in enumerate(by_predictor[: len(predictors)]):
                counts[index] += acceptance_counts(layout, predicted_BR, depths)
    totals, counts = ranks.sum(totals), ranks.sum(counts)
    means = {
        stream.name: (totals[stream.sum] / totals[2 + stream.count].clamp_min(1e-9)).item()
        for stream in objective.streams
    }
    metrics = {"loss": objective.loss(means, _EVAL_PROGRESS)} | means
    if depths:
        for prefix, count in zip(predictors, counts, strict=True):
            metrics |= _acceptance(prefix, count)
    return metrics


def _acceptance(prefix: str, counts: torch.Tensor) -> dict[str, float]:
    shares = survival(counts)
    metrics = {f"{prefix}acceptance_{depth}": share for depth, share in enumerate(shares, start=1)}
    return metrics | {f"{prefix}tokens_per_forward": expected_tokens_per_forward(counts)}
