"""Evaluation during training: held-out losses and teacher-forced acceptance.

The same blocks are masked each time, those of the schedule's end, so evaluations can be compared.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from mars_ray.core.acceptance import acceptance_counts, expected_tokens_per_forward, survival
from mars_ray.core.batch import TokenBatch
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
    depths = objective.depths
    # Clean CE, noisy CE, clean rows, noisy weight, then blocks reached and agreed by depth.
    totals = torch.zeros(4 + 2 * depths, dtype=torch.float64)
    for batch in batches:
        layout = objective.layout(batch, _EVAL_PROGRESS)
        sums, predicted_BR = engine.predict(layout)
        totals[:2] += sums.cpu()
        totals[2:4] += loss_counts(layout)
        if depths:
            totals[4:] += acceptance_counts(layout, predicted_BR.cpu(), depths).flatten()
    totals = ranks.sum(totals)
    clean_ce, noisy_ce = (totals[:2] / totals[2:4].clamp_min(1e-9)).tolist()
    if not depths:
        return {"loss": clean_ce, "clean_ce": clean_ce}
    counts = totals[4:].view(2, depths)
    weight = objective.ar_weight(_EVAL_PROGRESS)
    metrics = {"loss": noisy_ce + weight * clean_ce, "clean_ce": clean_ce, "noisy_ce": noisy_ce}
    for depth, share in enumerate(survival(counts), start=1):
        metrics[f"acceptance_{depth}"] = share
    metrics["tokens_per_forward"] = expected_tokens_per_forward(counts)
    return metrics
