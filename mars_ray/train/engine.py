"""The engine, which holds weights, gradients and AdamW: its interface, and plain PyTorch.

An engine receives losses that are already divided by the global counts, so the wanted gradient is
their *sum* over micro-batches and ranks.
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mars_ray.config.train import OptimizerConfig
from mars_ray.core.layout import Layout
from mars_ray.train.draft_adapter import DraftStep
from mars_ray.train.metrics import RankTimer
from mars_ray.train.model_step import TrainStep, layout_tensors
from mars_ray.train.ranks import Ranks, whole_shape

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


Step = TrainStep | DraftStep


class Engine(Protocol):
    """An engine; one optimizer step is `accumulate` for each micro-batch, then `step`."""

    def accumulate(self, layout: Layout, coefficient_BR: Tensor, *, last: bool) -> Tensor:
        """Forward and backward; returns this rank's (loss, its two sums), float64 (3,), detached.

        `last` marks the step's last micro-batch, whose backward reduces gradients over ranks.
        """
        ...

    def step(self, learning_rate: float) -> Tensor:
        """Clip and update; returns the norm before clipping, the same on every rank.

        If anything was not finite, neither is the norm, and the weights are untouched.
        """
        ...

    def predict(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """For evaluation, this rank's two sums, float64 (2,), and predictions, int64 (B, R), or
        (2, B, R) if mask rows have two."""
        ...

    def weights(self) -> dict[str, Tensor] | None:
        """The whole weights for a checkpoint on rank 0; None on other ranks. Collective."""
        ...

    def optimizer_state(self) -> OptimizerShare:
        """This rank's share of the optimizer's state; all shares make up the whole. Collective.

        Shares are keyed by parameter name, so that any number of ranks can load them.
        """
        ...

    def load_optimizer_state(self, shares: Iterable[OptimizerShare]) -> None:
        """Load the shares that all ranks of a run have written."""
        ...


class PlainEngine:
    """Plain PyTorch, data parallel by DDP; bfloat16 is autocast over float32 weights."""

    def __init__(
        self,
        step: Step,
        config: OptimizerConfig,
        ranks: Ranks,
        *,
        bfloat16: bool,
        timer: RankTimer,
    ) -> None:
        self._timer = timer
        self._step = step.to(ranks.device)
        self._ranks = ranks
        self._bfloat16 = bfloat16
        self._max_grad_norm = config.max_grad_norm
        self._optimizer = make_optimizer(step, config)
        self._parameters = [p for p in step.parameters() if p.requires_grad]
        self._ddp: DistributedDataParallel | None = None
        if ranks.world_size > 1:
            with warnings.catch_warnings():
                # torch 2.13 renames the argument; earlier versions know only the old name.
                warnings.simplefilter("ignore", FutureWarning)
                self._ddp = DistributedDataParallel(
                    step, broadcast_buffers=False, gradient_as_bucket_view=True
                )

    def accumulate(self, layout: Layout, coefficient_BR: Tensor, *, last: bool) -> Tensor:
        self._step.train()
        module: nn.Module = self._ddp or self._step
        with self._ddp.no_sync() if self._ddp and not last else nullcontext():
            with self._timer.measure(), self._autocast():
                loss, sums = module(
                    coefficient_BR=coefficient_BR.to(self._ranks.device),
                    **layout_tensors(layout, self._ranks.device),
                )
            # DDP averages gradients over ranks, but the loss has its global divisor already.
            (loss * self._ranks.world_size).backward()
        return torch.cat([loss.detach().double().unsqueeze(0), sums])

    def step(self, learning_rate: float) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        # The only synchronisation with the device in a step.
        if torch.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    @torch.no_grad()
    def predict(self, layout: Layout) -> tuple[Tensor, Tensor]:
        self._step.eval()
        with self._autocast():
            return self._step(**layout_tensors(layout, self._ranks.device))

    def weights(self) -> dict[str, Tensor] | None:
        return self._step.stored.state_dict() if self._ranks.is_main else None

    def optimizer_state(self) -> OptimizerShare:
        # Replicas are equal, so rank 0's copy stands for all.
        if not self._ranks.is_main:
            return {}
        states = ((name, self._optimizer.state[p]) for name, p in self._named())
        return {name: dict(state) for name, state in states if state}

    def load_optimizer_state(self, shares: Iterable[OptimizerShare]) -> None:
        named = dict(self._named())
        for share in shares:
            for name, state in share.items():
                parameter = named[name]
                self._optimizer.state[parameter] = {
                    key: value.to(parameter.device, copy=True) for key, value in state.items()
                }

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self._step.named_parameters() if p.requires_grad)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._ranks.device.type, dtype=torch.bfloat16, enabled=self._bfloat16)
