"""Low-rank adapters (LoRA) on a model, through peft, and their merging into plain weights. The
mask's embedding is trained with them, since a mask without one of its own predicts little.

peft is imported late, because it imports other packages, which takes seconds.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_NAME = "default"

_MASK = "lora_mask_H"  # a parameter of the embedding


def add_adapters(
    model: PreTrainedModel,
    mask_token_id: int | None,
    whole: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    seed: int,
) -> None:
    """Put adapters on all matrices of the layers, and freeze everything else but the embedding of
    the mask token, if there is one.

    They are initialized from the seed, so that all ranks start with the same weights. Within
    `whole(weight)` a weight that was cut into parts is whole.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=rank,
        # peft declares int, but only the ratio to the rank matters.
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=dropout,
        target_modules=[
            name
            for name, module in model.base_model.named_modules(prefix=model.base_model_prefix)
            if isinstance(module, torch.nn.Linear)
        ],
    )
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, _NAME)
    if mask_token_id is not None:
        embedding: Any = model.get_input_embeddings()
        with whole(embedding.weight):
            row_H = embedding.weight[mask_token_id].detach().clone()
        # A row of its own for the mask, which alone has a gradient.
        embedding.register_parameter(_MASK, nn.Parameter(row_H))

        def hook(module: Any, ids: tuple[Tensor], embedded: Tensor) -> Tensor:
            is_mask = (ids[0] == mask_token_id)[..., None]
            return torch.where(is_mask, getattr(module, _MASK).to(embedded.dtype), embedded)

        embedding.register_forward_hook(hook)


def adapter_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if ".lora_" in name}


def merged(
    model: PreTrainedModel, weights: dict[str, Tensor], mask_token_id: int | None
) -> dict[str, Tensor]:
    """The plain model's state dict, with the adapters of `model` added in float32."""
    from peft.tuners.lora import LoraLayer

    plain = {
        name.replace(".base_layer", ""): value
        for name, value in weights.items()
        if ".lora_" not in name
    }
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            down, up = (weights[f"{name}.lora_{side}.{_NAME}.weight"].float() for side in "AB")
            weight = plain[f"{name}.weight"]
            delta = module.scaling[_NAME] * (up @ down)
            plain[f"{name}.weight"] = (weight.float() + delta).to(weight.dtype)
        elif hasattr(module, _MASK):
            old = plain[f"{name}.weight"]
            weight = old.clone()
            weight[mask_token_id] = weights[f"{name}.{_MASK}"].to(weight.dtype)
            # The head too, if it is tied.
            same = [key for key, value in plain.items() if value.data_ptr() == old.data_ptr()]
            plain |= dict.fromkeys(same, weight)
    return plain
