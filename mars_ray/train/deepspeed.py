"""DeepSpeed ZeRO behind the engine interface; the one file that imports deepspeed.

The update is torch's own AdamW, handed in ready-made: DeepSpeed's CPU optimizer and its
shared-memory collectives would be compiled on first use, which takes minutes and a toolchain.
"""

import os
import warnings
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_ray.config.train import OptimizerConfig
from mars_ray.core.layout import Layout
from mars_ray.train.optim import make_optimizer
from mars_ray.train.ranks import Ranks
from mars_ray.train.step import TrainStep, layout_tensors

# The entries of a ZeRO optimizer's state dict that training changes: of stages 1 and 2, then of 3.
# A fresh optimizer of the same configuration has the others (the loss scale is constant without
# float16), and some of those are objects rather than data.
_CHANGING = {
    "base_optimizer_state",
    "single_partition_of_fp32_groups",
    "optimizer_state_dict",
    "fp32_flat_groups",
}


class DeepSpeedEngine:
    """ZeRO stage 1, 2 or 3; in bfloat16 the float32 weights live in the optimizer's partitions."""

    def __init__(
        self,
        step: TrainStep,
        config: OptimizerConfig,
        ranks: Ranks,
        *,
        bfloat16: bool,
        zero_stage: int,
        micro_batch_size: int,
    ) -> None:
        deepspeed = _import_deepspeed(ranks.device)
        self._gathered_parameters = deepspeed.zero.GatheredParameters
        self._ranks = ranks
        self._zero_stage = zero_stage
        self._finite = True
        self._engine, *_ = deepspeed.initialize(
            model=step,
            optimizer=make_optimizer(step, config),
            dist_init_required=not dist.is_initialized(),
            config={
                "train_micro_batch_size_per_gpu": micro_batch_size,
                # Micro-batches are marked one by one (`last`), whatever their number.
                "gradient_accumulation_steps": 1,
                "gradient_clipping": config.max_grad_norm,
                "zero_optimization": {"stage": zero_stage},
                "bf16": {"enabled": bfloat16},
                "steps_per_print": 1 << 40,
            },
        )

    def accumulate(self, layout: Layout, coefficient_BR: Tensor, *, last: bool) -> Tensor:
        self._engine.train()
        self._engine.set_gradient_accumulation_boundary(last)
        loss, sums = self._engine(
            coefficient_BR=coefficient_BR.to(self._ranks.device),
            **layout_tensors(layout, self._ranks.device),
        )
        self._finite &= bool(torch.isfinite(loss))
        # Gradients are averaged over ranks; the loss has its global divisor already.
        self._engine.backward(loss * self._ranks.world_size)
        return torch.cat([loss.detach().double().unsqueeze(0), sums])

    def step(self, learning_rate: float) -> Tensor:
        # DeepSpeed would skip or apply a non-finite step without a word: agree on it first.
        not_finite = torch.tensor([float(not self._finite)])
        if self._ranks.sum(not_finite).item() > 0:
            return torch.tensor(torch.nan)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        return torch.as_tensor(self._engine.get_global_grad_norm()).detach().float()

    @torch.no_grad()
    def predict(self, layout: Layout) -> tuple[Tensor, Tensor]:
        self._engine.eval()
        return self._engine(**layout_tensors(layout, self._ranks.device))

    def weights(self) -> dict[str, Tensor] | None:
        model = self._engine.module.model
        if self._zero_stage < 3:
            return model.state_dict() if self._ranks.is_main else None
        # Parameter by parameter: rank 0 alone ever holds the whole model.
        whole: dict[int, Tensor] = {}
        for parameter in model.parameters():
            with self._gathered_parameters([parameter]):
                if self._ranks.is_main:
                    whole[id(parameter)] = parameter.detach().cpu().clone()
        if not self._ranks.is_main:
            return None
        # Tied parameters stay one tensor, or the second would be written as a weight of its own.
        named = model.named_parameters(remove_duplicate=False)
        weights = {name: whole[id(parameter)] for name, parameter in named}
        return model.state_dict() | weights

    def optimizer_state(self) -> dict[str, Any]:
        state = self._engine.optimizer.state_dict()
        return {key: value for key, value in state.items() if key in _CHANGING}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        optimizer = self._engine.optimizer
        mine = optimizer.state_dict() | state
        # It wants every rank's state and takes this rank's.
        all_ranks = [mine] * self._ranks.world_size
        optimizer.load_state_dict(all_ranks, load_from_fp32_weights=True)


def _import_deepspeed(device: torch.device) -> ModuleType:
    """Late, because it takes three seconds; without the extension that wants a C++ compiler."""
    # Found out by trial, with a warning, otherwise.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # It calls collectives by names that torch 2.13 replaces; one line per call else.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    import deepspeed
    import deepspeed.ops

    if device.type == "cpu":
        # There is no public switch. Without it gloo carries the collectives.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
