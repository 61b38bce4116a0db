"""AdamW and its learning rate."""

import math

import torch
from torch import Tensor, nn

from mars_ray.config.train import OptimizerConfig

# AdamW's two moments and its step by parameter name; also the float32 weights, if the weights
# themselves are rounded to bfloat16.
OptimizerShare = dict[str, dict[str, Tensor]]


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW on all parameters; weight decay on matrices only, not on biases and norms."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if _is_matrix(p)], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if not _is_matrix(p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Shape of a parameter, even if ZeRO stage 3 has split it and its tensor is empty."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _is_matrix(parameter: nn.Parameter) -> bool:
    return len(whole_shape(parameter)) >= 2


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of step 0 .. total_steps - 1: linear warm-up, then cosine to `final_share`.

    The first step already has 1/warm-up of the peak; the last one is a step short of the final
    rate.
    """
    warmup_steps = math.ceil(config.warmup_share * total_steps)
    if step < warmup_steps:
        return config.learning_rate * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.final_share + (1 - config.final_share) * cosine)
