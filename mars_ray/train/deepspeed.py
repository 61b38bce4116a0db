"""DeepSpeed ZeRO behind the engine interface; the one file that imports deepspeed.

The optimizer is torch's AdamW, created here and passed in: DeepSpeed's CPU optimizer and its
shared-memory collectives would be compiled on first use, which takes minutes and a toolchain.
"""

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mars_ray.config.train import DeepSpeedEngine as ZeroConfig
from mars_ray.config.train import OptimizerConfig
from mars_ray.core.layout import Layout
from mars_ray.train.engine import OptimizerShare, Step, make_optimizer
from mars_ray.train.metrics import RankTimer
from mars_ray.train.model_step import layout_tensors
from mars_ray.train.plan import StagePlan
from mars_ray.train.ranks import Ranks

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "master"
_STEP = "step"


class DeepSpeedEngine:
    """ZeRO stage 1, 2 or 3; in bfloat16 the float32 weights live in the optimizer's partitions."""

    def __init__(
        self,
        step: Step,
        config: OptimizerConfig,
        ranks: Ranks,
        *,
        settings: dict[str, Any],
        timer: RankTimer,
    ) -> None:
        """`settings` comes from `zero_settings`."""
        self._timer = timer
        deepspeed = _import_deepspeed(ranks.device)
        self._gathered_parameters = deepspeed.zero.GatheredParameters
        self._fragments = deepspeed.utils
        self._ranks = ranks
        self._zero_stage = settings["zero_optimization"]["stage"]
        self._finite = True
        self._engine, *_ = deepspeed.initialize(
            model=step,
            optimizer=make_optimizer(step, config),
            dist_init_required=not dist.is_initialized(),
            config=settings,
        )

    def accumulate(self, layout: Layout, coefficient_BR: Tensor, *, last: bool) -> Tensor:
        self._engine.train()
        self._engine.set_gradient_accumulation_boundary(last)
        with self._timer.measure():
            loss, sums = self._engine(
                coefficient_BR=coefficient_BR.to(self._ranks.device),
                **layout_tensors(layout, self._ranks.device),
            )
        self._finite &= bool(torch.isfinite(loss))
        # DeepSpeed averages gradients over ranks, but the loss has its global divisor already.
        self._engine.backward(loss * self._ranks.world_size)
        return torch.cat([loss.detach().double().unsqueeze(0), sums])

    def step(self, learning_rate: float) -> Tensor:
        # DeepSpeed would silently skip or apply a non-finite step, so the ranks agree on it first.
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
        model = self._engine.module.stored
        if self._zero_stage < 3:
            return model.state_dict() if self._ranks.is_main else None
        # Gathered parameter by parameter, so that only rank 0 ever holds the whole model.
        whole: dict[int, Tensor] = {}
        for parameter in model.parameters():
            with self._gathered_parameters([parameter]):
                if self._ranks.is_main:
                    whole[id(parameter)] = parameter.detach().cpu().clone()
        if not self._ranks.is_main:
            return None
        # Tied parameters stay one tensor, or the second would be written as a separate weight.
        named = model.named_parameters(remove_duplicate=False)
        weights = {name: whole[id(parameter)] for name, parameter in named}
        return model.state_dict() | weights

    def optimizer_state(self) -> OptimizerShare:
        """Gather the state parameter by parameter; each rank keeps every world-size-th."""
        share: OptimizerShare = {}
        step = next((s[_STEP] for s in self._flat_states().values() if _STEP in s), None)
        if step is None:
            return share
        self._link_states()
        for index, (name, parameter) in enumerate(self._named()):
            values = {
                key: self._fragments.safe_get_full_optimizer_state(parameter, key)
                for key in _MOMENTS
            }
            values[_MASTER] = self._fragments.safe_get_full_fp32_param(parameter)
            if index % self._ranks.world_size == self._ranks.rank:
                share[name] = {key: value.cpu().clone() for key, value in values.items()}
                share[name][_STEP] = step.cpu().clone()
        return share

    def load_optimizer_state(self, shares: Iterable[OptimizerShare]) -> None:
        named = dict(self._named())
        step = None
        for share in shares:
            for name, state in share.items():
                if step is None:
                    step = state[_STEP]
                    self._start_states(step)
                parameter, device = named[name], self._ranks.device
                for key in (*_MOMENTS, _MASTER):
                    self._put(parameter, state[key].to(device), key)

    def _put(self, parameter: torch.nn.Parameter, value: Tensor, key: str) -> None:
        """Set this rank's part of a parameter's moment or float32 weights."""
        to = self._fragments
        if self._zero_stage == 3:
            # The last rank's part is padded, which the functions for whole values do not handle.
            size = cast(Any, parameter).partition_numel()
            padded = torch.zeros(size * self._ranks.world_size, device=value.device)
            padded[: value.numel()] = value.flatten()
            part = padded[size * self._ranks.rank :][:size]
            if key == _MASTER:
                to.safe_set_local_fp32_param(parameter, part)
            else:
                to.safe_set_local_optimizer_state(parameter, part, key)
        elif key == _MASTER:
            to.safe_set_full_fp32_param(parameter, value)
        else:
            to.safe_set_full_optimizer_state(parameter, value, key)

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        named = self._engine.module.named_parameters()
        return ((name, p) for name, p in named if p.requires_grad)

    def _flat_states(self) -> dict[Tensor, dict[str, Tensor]]:
        return self._engine.optimizer.optimizer.state

    def _start_states(self, step: Tensor) -> None:
        """Create the moments as AdamW would in its first step, and let parameters point to them."""
        states, optimizer = self._flat_states(), self._engine.optimizer
        # This rank's float32 weights, in the pieces that AdamW updates.
        pieces = (
            optimizer.single_partition_of_fp32_groups
            if self._zero_stage < 3
            else optimizer.fp32_partitioned_groups_flat
        )
        for flat in pieces:
            states[flat] = {key: torch.zeros_like(flat) for key in _MOMENTS}
            states[flat][_STEP] = step.to(flat.device, copy=True)
        self._link_states()

    def _link_states(self) -> None:
        """Make parameters point into the flat moments.

        ZeRO stages 1 and 2 do it only once, after the first step of the first group of parameters,
        when the other groups have no moments yet.
        """
        if self._zero_stage < 3:
            optimizer = self._engine.optimizer
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()


def zero_settings(plan: StagePlan, ranks: Ranks) -> dict[str, Any]:
    """DeepSpeed's configuration for a stage whose engine it is."""
    zero = plan.job.engine
    assert isinstance(zero, ZeroConfig)
    section: dict[str, Any] = {"stage": zero.zero_stage}
    if zero.offload != "none":
        section["offload_optimizer"] = {"device": "cpu"}
    if zero.offload == "all":
        section["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size(ranks.world_size),
        # The engine marks the last micro-batch itself (`last`), whatever their number.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": plan.config.optimizer.max_grad_norm,
        "zero_optimization": section,
        # DeepSpeed's own would be compiled; torch's fused AdamW runs on the CPU as well.
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": plan.job.precision == "bfloat16"},
        "steps_per_print": 1 << 40,
    }


@contextmanager
def loading_in_parts(settings: dict[str, Any], ranks: Ranks) -> Iterator[None]:
    """A context in which transformers splits loaded weights among the ranks; collective.

    Otherwise every worker would hold a whole model before ZeRO stage 3 splits it. Rank 0 reads the
    weights.
    """
    _import_deepspeed(ranks.device)
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    # transformers consults this object as long as it exists.
    config = HfDeepSpeedConfig(settings)
    try:
        yield
    finally:
        del config


def gathered(weight: Tensor) -> AbstractContextManager[Any]:
    """Within it, a weight that DeepSpeed has cut into parts is whole; collective."""
    if not hasattr(weight, "ds_id"):
        return nullcontext()
    return _import_deepspeed(weight.device).zero.GatheredParameters([weight])


def _import_deepspeed(device: torch.device) -> ModuleType:
    """Import late, because it takes three seconds, without the extension that needs a compiler."""
    # Otherwise DeepSpeed finds the device by trial, with a warning.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # It calls collectives by names that torch 2.13 replaces, with a line of warning per call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    import deepspeed
    import deepspeed.ops

    if device.type == "cpu":
        # There is no public switch. Without this extension gloo runs the collectives.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
