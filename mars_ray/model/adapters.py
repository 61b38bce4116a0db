"""Low-rank adapters (LoRA) on a model, through peft, and their merging into plain weights.

peft is imported late, because it imports other packages, which takes seconds.
"""

import warnings

import torch
from torch import Tensor
from transformers import PreTrainedModel

_NAME = "default"
_WITHIN = ".base_layer"


def add_adapters(
    model: PreTrainedModel, *, rank: int, alpha: float, dropout: float, seed: int
) -> None:
    """Put adapters on all matrices of the layers, and freeze everything else.

    They are initialized from the seed, so that all ranks start with the same weights.
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


def adapter_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The adapters' part of a state dict."""
    return {name: value for name, value in weights.items() if ".lora_" in name}


def merged(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The plain model's state dict, with the adapters of `model` added in float32."""
    from peft.tuners.lora import LoraLayer

    plain = {
        name.replace(_WITHIN, ""): value for name, value in weights.items() if ".lora_" not in name
    }
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            down, up = (weights[f"{name}.lora_{side}.{_NAME}.weight"].float() for side in "AB")
            weight = plain[f"{name}.weight"]
            delta = module.scaling[_NAME] * (up @ down)
            plain[f"{name}.weight"] = (weight.float() + delta).to(weight.dtype)
    return plain
